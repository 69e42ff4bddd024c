"""The scheduler's main thread on a core of its own, and everything else on another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEDULER = "sglang::schedul"  # what SGLang names the process, as far as the kernel keeps it


@contextmanager
def everything_on_one_core() -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on the last core that it may use."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise SystemExit("benchmarks.interference: pinning takes two cores")
    _set_all_threads(os.getpid(), {max(allowed)})
    try:
        yield
    finally:
        _set_all_threads(os.getpid(), allowed)


def give_schedulers_a_core(core: int) -> None:
    """Move the main thread of each SGLang scheduler that runs on this machine to ``core``. What else they run stays."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == _SCHEDULER:
                os.sched_setaffinity(int(process.name), {core})
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile


def first_core() -> int:
    return min(os.sched_getaffinity(0))


def _set_all_threads(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue
