"""A small run of each benchmark that starts SGLang: it ends, and writes figures that make sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import demo, sessions, ttft
from benchmarks.sharegpt import main as sharegpt
from benchmarks.soak import engines
from tests.benchmarks.conftest import Run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path, answer = tmp_path / "some.json", {"from": "gpt", "value": "so be it"}
    said = [[{"from": "human", "value": f"{i} {j} " + "word " * 100} for j in range(2)] for i in range(2)]
    path.write_text(
        json.dumps([{"conversations": [turn for user in turns for turn in (user, answer)]} for turns in said])
    )
    return path


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the real model, a random one stands in."""
    monkeypatch.setattr(demo, "is_available", lambda: False)
    picture, recording = tmp_path / "demo.png", tmp_path / "demo.svg"
    assert demo.main(["--link-gbps", "0.2", "--picture", str(picture), "--recording", str(recording)]) == 0
    said = capsys.readouterr().out
    assert "small random model is used" in said
    assert "tokens from the store" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    drawn = recording.read_text()
    assert drawn.count("animation: appear") > 15
    assert "from&#160;the&#160;store" in drawn


def test_ttft(run: Run, tiny_llama: Path, text: Path) -> None:
    """Raw reuse is slower over a slower link, and computing does not care."""
    args = ["--model", tiny_llama, "--profile", "none", "--text", text, "--part", "0:1", "--tokens", 512]
    rows = run(ttft.main, *args, "--gbps", "0.01,1", "--prompts", 2, "--methods", "computing,raw reuse")["rows"]
    computing_slow, computing_fast, raw_slow, raw_fast = rows
    assert computing_slow["ttft_s"] == computing_fast["ttft_s"]
    assert (computing_slow["cached_tokens"], computing_slow["wire_bytes"]) == (0, 0)
    assert raw_slow["cached_tokens"] == raw_fast["cached_tokens"] >= 0.9 * 512
    link_s = raw_slow["wire_bytes"] * 8 / 0.01e9
    assert raw_slow["ttft_s"]["p50"] > 0.9 * link_s
    assert raw_slow["ttft_s"]["p50"] > raw_fast["ttft_s"]["p50"] + 0.8 * link_s


def test_sharegpt(run: Run, dataset: Path) -> None:
    args = ["--dataset", dataset, "--backends", "none,kvfetch", "--turns", 2, "--max-input-tokens", 256]
    none, ours = run(sharegpt, *args, "--max-new-tokens", 4)["runs"]
    assert (none["name"], ours["name"]) == ("none", "kvfetch")
    assert none["requests"] == ours["requests"] == 4
    assert none["failures"] == ours["failures"] == 0
    assert none["prompts_digest"] == ours["prompts_digest"]
    assert none["cached_tokens"]["storage"] == none["wire_bytes"] == 0
    assert ours["cached_tokens"]["storage"] > 200
    assert min(ours["wire_bytes"], ours["raw_bytes"]) > 0
    assert ours["same_answers_as_first_run"] == 4  # `exact` keeps every bit


def test_sessions(run: Run) -> None:
    """Answers are right, also where a store and data planes are killed, and then all that was stored is found."""
    args = ["--turns", 4, "--tokens", 200, "--pause", 0.1, "--store", "http"]
    (row,) = run(sessions.main, *args, "--mode", "host", "--replicas", 2)["rows"]
    assert row["problems"] == []
    assert row["fetched_tokens"] == 768
    assert row["sent"] >= 1
    (killed,) = run(sessions.main, *args, "--mode", "device", "--replicas", 1, "--kill")["rows"]
    assert killed["problems"] == []


def test_soak_of_engines(run: Run) -> None:
    """Two ranks in each mode, over TLS that fails."""
    found = run(engines.main, "--minutes", 0.4, "--longest", 200)
    assert found["problems"] == {}
    for mode in ("host", "device"):
        assert found["requests"][f"{mode}: hits"] > 0
        assert found["requests"][f"{mode}: sound audits"] > 0
    assert sum(found["faults"].values()) > 0
