from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import ttft
from benchmarks.ttft import Row


def row(method: str, gbps: float, *ttft_s: float, prompt_tokens: int = 64) -> Row:
    return Row(method, prompt_tokens, gbps, ttft_s, 1_000_000, 48)


def test_percentiles_are_of_the_prompts() -> None:
    found = row("ours", 1, *(0.1 * i for i in range(20, 0, -1)))
    assert (found.p50_s, found.p95_s) == (pytest.approx(1.05), pytest.approx(1.9))
    assert row("ours", 1, 3.0).p95_s == 3.0


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    cases = itertools.product(("computing", "ours"), (0.1, 1), (64, 8))
    rows = [row(method, gbps, 1.0, 2.0, prompt_tokens=tokens) for method, gbps, tokens in cases]
    ttft.plot_rows(tmp_path / "plot.png", rows, "numbers")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.sglang
def test_a_short_run(tiny_llama: Path, tmp_path: Path) -> None:
    """Raw reuse is slower over a slower link, and computing does not care."""
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text(" ".join(f"w{3 + i * i % 500}" for i in range(3000)))
    arguments = ["--model", str(tiny_llama), "--profile", "none", "--text", str(text), "--json", str(out)]
    arguments += [
        "--part",
        "0:1",
        "--tokens",
        "512",
        "--gbps",
        "0.01,1",
        "--prompts",
        "2",
        "--methods",
        "computing,raw reuse",
    ]
    assert ttft.main(arguments) == 0
    computing_slow, computing_fast, raw_slow, raw_fast = json.loads(out.read_text())["rows"]
    assert computing_slow["ttft_s"] == computing_fast["ttft_s"]
    assert (computing_slow["cached_tokens"], computing_slow["wire_bytes"]) == (0, 0)
    assert raw_slow["cached_tokens"] == raw_fast["cached_tokens"] >= 0.9 * 512
    link_s = raw_slow["wire_bytes"] * 8 / 0.01e9
    assert raw_slow["ttft_s"]["p50"] > 0.9 * link_s
    assert raw_slow["ttft_s"]["p50"] > raw_fast["ttft_s"]["p50"] + 0.8 * link_s
