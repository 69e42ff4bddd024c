from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.codec.__main__ import _was_calibrated_on, main
from tests.codec.quant.profiles import make_profile

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG\r\n\x1a\n"


def _text(directory: Path, num_words: int) -> Path:
    path = directory / "text.txt"
    path.write_text(" ".join(f"w{3 + i * 37 % 2000}" for i in range(num_words)))
    return path


def test_end_to_end(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.codec", "--model", str(tiny_llama), "--text"]
    command += [str(_text(tmp_path, 400)), "--json", str(out), "--windows", "2", "--context", "128"]
    command += ["--continuation", "16", "--methods", "exact/zstd,cachegen-16/256,kivi-*"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "cachegen-16/256" in run.stdout
    assert out.with_suffix(".png").read_bytes().startswith(PNG)

    content = json.loads(out.read_text())
    assert content["model"] == str(tiny_llama)
    assert content["text"].endswith("text.txt")
    assert (content["windows"], content["context_tokens"], content["continuation_tokens"]) == (2, 128, 16)
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["torch"]
    assert content["kv"]["layers"] == 4
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == ["exact/zstd", "cachegen-16/256", "kivi-4", "kivi-2"]
    for row in rows.values():
        assert row["source"]
        assert row["ratio"] == pytest.approx(16 / row["bits_per_value"])
        for figure in ("bits", "kl", "dnll", "top1"):
            low, high = row[f"{figure}_ci"]
            mean = row["bits_per_value" if figure == "bits" else figure]
            assert low <= mean <= high
        assert row["encode_mb_s"] > 0
        assert row["decode_mb_s"] > 0
    assert rows["exact/zstd"]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows["exact/zstd"]["dnll"] == 0
    assert rows["kivi-2"]["kl"] > rows["kivi-4"]["kl"] > 0


def test_a_profile_of_another_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    profile = tmp_path / "other.profile"
    make_profile().save(profile)
    args = f"--model {tiny_llama} --text {_text(tmp_path, 200)} --windows 1 --context 64 --profile {profile}"
    with pytest.raises(SystemExit, match=r"the profile is for a model of 3 layers, 4 heads of 16 \(K\) and 16 \(V\)"):
        main(args.split())


def test_shares_of_bytes_are_reported(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, out = tmp_path / "tiny.profile", tmp_path / "out.json"
    make_profile(num_layers=4, num_heads=2, head_dim=64, cell_heads=2, num_sinks=1).save(profile)
    args = f"--model {tiny_llama} --text {_text(tmp_path, 200)} --windows 1 --context 64 --continuation 8"
    methods = "exact/zstd,kivi-4,klt-0.001/zstd"
    assert main([*args.split(), "--methods", methods, "--profile", str(profile), "--json", str(out)]) == 0
    assert re.search(
        r"klt-0.001/zstd . manifests \d+\.\d%, exponents \d+\.\d%, exact \d+\.\d%", capsys.readouterr().out
    )
    shares = {row["name"]: row["shares"] for row in json.loads(out.read_text())["rows"]}
    assert set(shares["exact/zstd"]) == {"manifests", "k byte 0", "k byte 1", "v byte 0", "v byte 1"}
    assert shares["kivi-4"] == {}
    assert set(shares["klt-0.001/zstd"]) == {"manifests", "exponents", "exact", "coefficients", "second integers"}
    assert sum(shares["klt-0.001/zstd"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "part", "calibrated_part", "overlaps"),
    [
        ("none", "0:1", "0.5:1", True),
        ("none", "0:0.5", "0.5:1", False),
        ("none", "0:0.5", "", True),  # by a version that did not note it
        ("other", "0:1", "0:1", False),
    ],
)
def test_text_that_a_profile_was_calibrated_on_is_known(
    name: str, part: str, calibrated_part: str, overlaps: bool
) -> None:
    profile = make_profile()
    calibration = msgspec.structs.replace(profile.calibration, part=calibrated_part)
    profile = dataclasses.replace(profile, calibration=calibration)
    assert _was_calibrated_on(profile, Path("somewhere") / name, part) == overlaps


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--methods cachegen*,zip", "no method matches 'zip'; known are exact/hevc"),
        ("--methods klt*", "klt needs --profile"),
        ("--profile no-such-file", "no-such-file cannot be read"),
        ("--text no-such-text", "no-such-text"),
        ("--model {empty}", "no model with a tokenizer at"),
        ("--device no-such-device", "--device no-such-device: "),
        ("--part 1:0", "expected FROM:TO"),
        ("--part 0:0.3", "0 windows of 81 tokens, expected 1"),
        ("--windows 9", "2 windows of 81 tokens, expected 9"),
        ("--continuation 4096", "4161 tokens"),
    ],
)
def test_what_cannot_be_run_is_said_without_a_traceback(
    args: str, message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    common = f"--model {tiny_llama} --text {_text(tmp_path, 200)} --windows 1 --context 64 --continuation 16"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit) as ended:
        main([*common.split(), *args.format(empty=empty).split()])
    assert message in str(ended.value)
