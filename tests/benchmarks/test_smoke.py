"""A small run of each benchmark that needs no SGLang server: it ends, and writes figures that make sense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import audits, data_plane, fetch, memory, writing
from benchmarks.real_model import prose
from benchmarks.soak.__main__ import main as soak
from harness.models import make_tiny_llama
from tests.benchmarks.conftest import Run
from tests.codec.quant.profiles import make_profile


@pytest.mark.slow
def test_data_plane_of_coded_cells(run: Run) -> None:
    coded = run(data_plane.main, "--coded", "--tokens", 256, "--rounds", 2)["coded"]
    assert coded["num_cells"] == 11 * 4
    assert 256 * 32 * 8 * 256 * 1 / 8 < coded["wire_bytes"] < 256 * 32 * 8 * 256 * 2 / 8
    assert all(figure > 0 for each in coded["rounds"] for name, figure in each.items() if name.endswith("_s"))


@pytest.mark.slow
def test_writing(run: Run) -> None:
    rows = run(writing.main, "--tokens", 256, "--layers", 2, "--rounds", 2)["writes"]
    assert [(row["codec"], row["round"]) for row in rows] == [("ans", 1), ("ans", 2), ("raw", 1), ("raw", 2)]
    assert all(row["raw_mb_per_s"] > 0 and row["data_plane_cpu_s_per_gb"] > 0 for row in rows)


@pytest.mark.slow
def test_data_plane(run: Run) -> None:
    args = [
        "--codecs",
        "raw,zstd",
        "--prefixes",
        2,
        "--tokens",
        128,
        "--rounds",
        1,
        "--security",
        "none",
        "tls",
        "encrypted",
    ]
    rows = run(data_plane.main, *args)["codecs"]
    assert {row["security"] for row in rows} == {"none", "tls", "encrypted"}
    for row in rows:
        assert row["raw_gb"] == pytest.approx(2 * 128 * 6 * 8 * 128 * 2 * 2 / 1e9)
        assert 0 < row["wire_gb"] < row["raw_gb"]
        assert 0 < row["engine_share_of_cpu"] < 1
        assert row["fetch_wire_gb_per_s"] > 0


def test_fetch(run: Run) -> None:
    args = ["--tokens", 256, "--codecs", "zstd", "--rounds", 1, "--settings", "link"]
    [row] = run(fetch.main, *args)["settings"]
    assert row["ideal_s"] == max(row["stages_s"]["transmit"], row["stages_s"]["decode_restore"])
    assert row["efficiency"] == pytest.approx(row["ideal_s"] / row["actual_s"])


@pytest.mark.slow
def test_memory(run: Run) -> None:
    args = ["--tokens", 2048, "--layers", 1, "--codec", "zstd", "--quantiser", "exact"]
    [point] = run(memory.main, *args)["points"]
    assert point["raw_bytes"] == 2048 * 2 * 8 * 128 * 2
    assert 0 < point["compressed_bytes"] <= point["stored_bytes"]
    assert point["compressed_bytes"] < point["peak_bytes"]
    assert 1 << 20 < point["decoded_bytes"] < memory.GOAL_BYTES


@pytest.mark.slow
def test_soak(run: Run) -> None:
    sizes = ["--minutes", 0.4, "--clients", 8, "--slow-readers", 8, "--capacity", 32, "--orphan-age", 5]
    found = run(soak, *sizes, "--longest-lookup", 20)
    assert found["problems"] == []
    assert found["disturbances"]["killed"] > 0
    assert found["disturbances"]["full"] > 0
    for operation, result in (("read", "hit"), ("write", "done"), ("replace", "done"), ("delete", "done")):
        assert found["outcomes"][operation][result] > 0


def test_audits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=64, head_dim=16)
    profile = make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=2)
    profile.save(tmp_path / "profile")
    monkeypatch.setattr(audits, "prose", text.read_text)
    arguments = ("--windows", "1", "--context", "64", "--model", str(model), "--profile", str(tmp_path / "profile"))
    assert audits.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["exact", "sound", "most", "0.00,", "typical", "at", "most", "0.00"]
    found = {
        line[10:44].strip(): float(line[44:].split()[1])
        for line in lines
        if line.startswith("exact") and "least" in line
    }
    assert len(found) == 14
    assert sorted(found.values())[1] > 1  # the pages of another prompt are its own, since there is one


def test_sound_audits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=64, head_dim=16)
    make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=2).save(tmp_path / "profile")
    monkeypatch.setattr(audits, "_text", lambda kind: text.read_text() * 20)
    file = tmp_path / "sound"
    arguments = ("--sound", str(file), "--model", str(model), "--profile", str(tmp_path / "profile"), "--windows", "1")
    for skip, num_audits in (("0", 48), ("4", 96)):  # in pieces
        assert audits.main((*arguments, "--skip", skip)) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{num_audits} audits, about")
        assert len(file.read_text().splitlines()) == num_audits


def test_what_audits_cost(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=64, head_dim=16)
    make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=2).save(tmp_path / "profile")
    monkeypatch.setattr(audits, "prose", text.read_text)
    arguments = ("--cost", "3", "--model", str(model), "--profile", str(tmp_path / "profile"))
    assert audits.main(arguments) == 0
    found = re.findall(r"^(.*): .* ([\d.]+) ms of CPU time .* in 3\)", capsys.readouterr().out, re.MULTILINE)
    names, whole, compared = [name for name, _ in found[::2]], *([float(ms) for _, ms in found[i::2]] for i in (0, 1))
    assert names == ["exact", "klt", "klt 1e-2"]
    assert all(0 < part < all_ for part, all_ in zip(compared, whole, strict=True))


def test_real_model(real_model: Path) -> None:
    """It was converted well, or it would not know."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    tokens = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=1)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris"
    assert prose().startswith('The "assert" statement')
