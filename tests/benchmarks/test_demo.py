"""What the demo says, and when it fails. A run of it is in test_smoke_sglang.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo import OURS, Run, Subject, _judge, _report, verdict
from harness.engine import Generation

SUBJECT = Subject("a model", Path("model"), [1] * 100, "What is it?", "tulip", {}, [])
RIGHT = Generation("It is tulip.", [1, 2], [], 96, {}, 1.0, {})
WRONG = replace(RIGHT, text="It is rose.", output_ids=[1, 3])
COMPUTED = replace(RIGHT, cached_tokens=0)


def test_the_verdict_names_the_fastest() -> None:
    said = verdict({"computing": 3.0, "raw bytes": 6.0, OURS: 1.5})
    assert said.startswith(f"{OURS}: the first token after 1.50 s, 2.0 times as fast as computing (3.00 s)")
    assert "4.0 times as fast as raw bytes" in said
    said = verdict({"computing": 1.0, "raw bytes": 6.0, OURS: 1.5})
    assert said.startswith("Here computing is faster: 1.00 s")


@pytest.mark.parametrize(
    ("raw", "ours", "code"),
    [
        (RIGHT, RIGHT, 0),
        (RIGHT, replace(RIGHT, output_ids=[1, 9]), 0),  # other words, and right
        (RIGHT, WRONG, 1),
        (WRONG, RIGHT, 1),
        (RIGHT, replace(RIGHT, cached_tokens=16), 1),
    ],
)
def test_it_fails_by_answers_and_reuse(raw: Generation, ours: Generation, code: int) -> None:
    runs = (Run(COMPUTED, [RIGHT, fetched], 1) for fetched in (raw, ours))
    assert _judge(Console(quiet=True), SUBJECT, *runs) == code


@pytest.mark.parametrize(("cached_tokens", "is_said"), [(96, True), (16, False)])
def test_no_verdict_on_what_was_not_fetched(
    cached_tokens: int, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = replace(RIGHT, cached_tokens=cached_tokens, ttft_s=0.5)
    answers = {"computing": COMPUTED, "raw bytes": RIGHT, OURS: ours}
    _report(Console(), SUBJECT, answers, dict.fromkeys(answers, 0), "a title")
    assert ("times as fast" in capsys.readouterr().out) == is_said
