"""What fuzzing found stays found, and 20 seconds of it find nothing more. ``python -m tests.fuzz`` goes on."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codec.bitstream.mutations import mutate_body
from tests.fuzz.targets import TARGETS, seeds_of

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_finds_nothing(name: str) -> None:
    inputs = [*seeds_of(name), *(path.read_bytes() for path in sorted((FOLDER / "corpus" / name).glob("*")))]
    for data in inputs:
        TARGETS[name](data)


def test_changed_manifests_find_nothing() -> None:
    rng = random.Random(0)
    for data in seeds_of("manifests"):
        for _ in range(300):
            TARGETS["manifests"](mutate_body(data, rng))


@pytest.mark.slow
def test_20_seconds_of_fuzzing_find_nothing() -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86_64 alone")
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "20"]
    result = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-5000:]
