"""Pins the scheduler's main thread to one core, and everything else to another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEDULER = "sglang::schedul"  # SGLang's name for the process, which the kernel truncates


@contextmanager
def everything_on_one_core() -> Iterator[None]:
    """Pin this process, and the processes that it starts meanwhile, to the last core that it may use."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise SystemExit("benchmarks.interference: pinning needs at least two cores")
    _set_all_threads(os.getpid(), {max(allowed)})
    try:
        yield
    finally:
        _set_all_threads(os.getpid(), allowed)


def give_schedulers_a_core(core: int) -> None:
    """Pin the main thread of each SGLang scheduler on this machine to ``core``. Their other threads stay in place."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == _SCHEDULER:
                os.sched_setaffinity(int(process.name), {core})
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended


def first_core() -> int:
    return min(os.sched_getaffinity(0))


def _set_all_threads(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue
