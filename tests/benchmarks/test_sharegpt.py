"""The whole benchmark, small: real SGLang processes, a real store, real video."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.sharegpt"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "some.json"
    said = [[{"from": "human", "value": f"{i} {j} " + "word " * 100} for j in range(2)] for i in range(2)]
    entries = [{"conversations": [turn for user in turns for turn in (user, ANSWER)]} for turns in said]
    path.write_text(json.dumps(entries))
    return path


ANSWER = {"from": "gpt", "value": "so be it"}


def _environment(scratch: Path) -> dict[str, str]:
    scratch.mkdir()
    return {**os.environ, "TMPDIR": str(scratch)}


@pytest.mark.sglang
@pytest.mark.slow
def test_launch_compares_backends(dataset: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    args = ["--launch", "--dataset", str(dataset), "--backends", "none,kvfetch", "--turns", "2"]
    sizes = ["--max-input-tokens", "256", "--max-new-tokens", "4", "--json", str(tmp_path / "out.json")]
    environment = _environment(scratch)
    done = subprocess.run([*COMMAND, *args, *sizes], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    none, ours = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (none["name"], ours["name"]) == ("none", "kvfetch")
    assert none["requests"] == ours["requests"] == 4
    assert none["failures"] == ours["failures"] == 0
    assert none["prompts_digest"] == ours["prompts_digest"]
    assert none["cached_tokens"]["storage"] == none["wire_bytes"] == 0
    assert ours["cached_tokens"]["storage"] > 200
    assert ours["wire_bytes"] > 0
    assert ours["raw_bytes"] > 0
    assert ours["fill"]["pages_stored"] > 0
    # `exact` keeps every bit, so a cache that is read back changes no answer.
    assert ours["same_answers_as_first_run"] == 4
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert "cached, from storage" in done.stdout
    assert [path.name for path in scratch.iterdir() if path.name.startswith(("kvfetch-", "sglang-"))] == []


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind_when_it_is_stopped(dataset: Path, tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    args = [*COMMAND, "--launch", "--dataset", str(dataset), "--backends", "kvfetch"]
    with subprocess.Popen(
        args, cwd=ROOT, env=_environment(scratch), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        wait_until(lambda: process.poll() is not None or any(scratch.glob("sglang-*/server.log")))
        assert process.poll() is None
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output.decode()
    assert [path.name for path in scratch.iterdir() if path.name.startswith(("kvfetch-", "sglang-"))] == []
    assert _commands_with(str(scratch)) == []


def _commands_with(text: str) -> list[str]:
    """Command lines of running processes that name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found
