"""The steps of a check, in the order in which they run, each in a process of its own. Their time limits
add up to at most that of the whole run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.record import Outcome
from harness.children import start_child

TOTAL_S = 720.0


@dataclass(frozen=True)
class Step:
    """``runs``: the step's function as ``module:name``. It takes a `Record`."""

    name: str
    title: str
    runs: str
    limit_s: float
    needs_gpu: bool = True


_HERE = "benchmarks.gpu_check"

# The first step finds out whether there is a GPU. What decides most comes first: a run may be cut off.
STEPS = (
    Step("machine", "Hardware, driver, versions", f"{_HERE}.facts:run", 25, needs_gpu=False),
    Step("first", "Registered memory, copies, one cell of each coding", f"{_HERE}.first:run", 60),
    Step("kernels", "restore_klt against its reference and a device copy", f"{_HERE}.kernels:run", 30),
    Step("ans", "ans: bits, checksums and speed", f"{_HERE}.ans:run", 15),
    Step("quantise", "klt quantised on the device: integers and speed", f"{_HERE}.quantise:run", 10),
    Step("exact", "exact: bits and speed", f"{_HERE}.exact:run", 15),
    Step("loads", "Loads of 32K tokens: values, time, memory, forward passes", f"{_HERE}.loads:run", 75),
    Step("sglang_8b", "SGLang in device mode: times", f"{_HERE}.server:run_large", 240),
    Step("host_tier", "SGLang's own host tier: times", f"{_HERE}.server:run_host_tier", 75),
    Step("ranks", "Ranks that staged differently: no other slot is written", f"{_HERE}.loads:run_ranks", 40),
    Step("tests", "pytest -m gpu", f"{_HERE}.tests:run", 60),
    Step("sglang", "SGLang in device mode: answers", f"{_HERE}.server:run", 60),
)


_END_S = 20.0  # for a step to clean up after its time limit; an interpreter takes seconds on a busy machine
_TAIL_LINES = 30
_LOOK_S = 1.0  # between two looks at what a step has recorded


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log_tail: str = ""  # only for a failed step


def skipped(step: Step, reason: str) -> Result:
    return Result(step.name, step.title, "skipped", reason)


def run_step(
    step: Step, folder: Path, limit_s: float, progress: Callable[[Result], object] = lambda result: None
) -> Result:
    """Run a step and kill all processes of its group. Always returns within about ``limit_s``.

    ``progress`` is called with what a step has recorded so far, as the result of one that was cut off: whoever lends
    the machine may end the whole run before the step ends.
    """
    found_path, log_path = folder / f"{step.name}.json", folder / f"{step.name}.log"
    started_s = time.monotonic()

    def result(died: str) -> Result:
        return _result(step, time.monotonic() - started_s, found_path, log_path, died)

    with log_path.open("wb") as log:
        process = start_child(
            [sys.executable, "-m", "benchmarks.gpu_check.step", step.runs, str(found_path), str(limit_s)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            died = _wait(process, started_s + limit_s, lambda: progress(result("cut off with the whole run")))
        finally:
            _end(process)
    return result(died or f"not done within {limit_s:.0f} s")


def _wait(process: subprocess.Popen[bytes], deadline_s: float, look: Callable[[], object]) -> str:
    """Wait for the process. Return how it ended, which explains a step without an outcome; empty if it was ended."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(_LOOK_S, left_s))
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        look()
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(step: Step, seconds: float, found_path: Path, log_path: Path, died: str) -> Result:
    found: dict[str, Any] = json.loads(found_path.read_text()) if found_path.exists() else {}
    outcome: Outcome | None = found.get("outcome")
    reason: str = found.get("reason", "")
    if outcome is None:
        outcome, reason = "failed", "; ".join(filter(None, (reason, died)))
    tail = log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if outcome == "failed" else []
    return Result(
        step.name,
        step.title,
        outcome,
        reason,
        seconds,
        found.get("rows", []),
        found.get("notes", []),
        "\n".join(tail),
    )
