"""A small run of each benchmark's command: it ends well, and writes all figures."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import demo
from benchmarks.real_model import prose
from tests.codec.quant.profiles import make_profile

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """``keys``: of the JSON. ``row_keys``: of the objects in its list, if there is one."""

    module: str
    arguments: str
    keys: str
    row_keys: str = ""


CASES = [
    Case(
        "codec.__main__",
        "--model {model} --text {text} --windows 2 --context 128 --continuation 16 --profile {profile}"
        " --methods exact/zstd,cachegen-16/2048,klt-0.001/ans,klt/levels-*",
        "benchmark config nll rows",
        "name ratio samples bits_per_value bits_ci kl kl_ci dnll dnll_ci top1 top1_ci",
    ),
    Case(
        "codec.speed",
        "--model {model} --text {text} --profile {profile} --context 128 --rounds 1",
        "benchmark config rows",
        "target_kl codec bits decode_mb_s encode_mb_s restore_mb_s quantise_mb_s",
    ),
    Case(
        "data_plane",
        "--tokens 256 --rounds 1",
        "tokens rounds",
        "sockets_s sockets_cpu_s stage_s data_plane_cpu_s store_cpu_s again_s again_cpu_s",
    ),
    Case(
        "data_plane",
        "--write --tokens 256 --rounds 1",
        "tokens rounds",
        "codec round raw_mb_per_s engine_cpu_s_per_gb data_plane_cpu_s_per_gb store_cpu_s_per_gb",
    ),
    Case(
        "soak.__main__",
        "--minutes 0.4 --clients 8 --slow-readers 8 --capacity 32 --longest-lookup 20",
        "outcomes disturbances lookup_s most_disk_bytes growth verified problems samples",
        "at_s pid rss_bytes open_files disk_bytes",
    ),
    Case(
        "ttft",
        "--model {model} --profile none --text {text} --part 0:1 --tokens 512 --gbps 0.1 --prompts 2"
        " --methods 'computing,raw reuse'",
        "benchmark mode model profile dtype rows",
        "method prompt_tokens gbps ttft_s wire_bytes cached_tokens",
    ),
    Case("soak.engines", "--minutes 0.4 --longest 200", "requests faults problems memory"),
]
STARTS_SGLANG = ("ttft", "soak.engines")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.module, marks=pytest.mark.sglang if case.module in STARTS_SGLANG else ())
        for case in CASES
    ],
)
def test_a_small_run_writes_all_figures(case: Case, tiny_llama: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("text", "profile")}
    files["text"].write_text(" ".join(f"w{3 + i * i % 250}" for i in range(4000)))  # which the tokenizer knows
    make_profile(num_layers=4, num_heads=2, head_dim=64, cell_heads=2, num_sinks=1).save(files["profile"])
    arguments, written = shlex.split(case.arguments.format(model=tiny_llama, **files)), tmp_path / "out.json"
    assert importlib.import_module(f"benchmarks.{case.module}").main([*arguments, "--json", str(written)]) == 0
    content = json.loads(written.read_text())
    assert content.keys() >= {*case.keys.split(), "machine", "versions"}
    rows = content[case.keys.split()[-1]] if case.row_keys else []
    assert all(row.keys() == {*case.row_keys.split()} for row in rows)
    assert rows or not case.row_keys


@pytest.mark.sglang
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the real model, a random one stands in."""
    monkeypatch.setattr(demo, "is_available", lambda: False)
    picture, recording = tmp_path / "demo.png", tmp_path / "demo.svg"
    assert demo.main(["--link-gbps", "0.2", "--picture", str(picture), "--recording", str(recording)]) == 0
    assert "small random model is used" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert recording.read_text().count("animation: appear") > 15


def test_real_model(real_model: Path) -> None:
    """It was converted well, or it would not know."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    tokens = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=1)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris"
    assert prose().startswith('The "assert" statement')
