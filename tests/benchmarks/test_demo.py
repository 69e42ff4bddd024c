"""What the demo says, and when it fails. A run of it is in test_smoke_sglang.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo import Run, Subject, _judge
from harness.engine import Generation

SUBJECT = Subject("a model", Path("model"), [1] * 100, "What is it?", "tulip", {}, [])
RIGHT = Generation("It is tulip.", [1, 2], [], 96, {}, 1.0, {})
WRONG = replace(RIGHT, text="It is rose.", output_ids=[1, 3])
COMPUTED = replace(RIGHT, cached_tokens=0)


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
