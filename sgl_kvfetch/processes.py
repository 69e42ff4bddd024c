"""What the system does for one process: end it with its parent, keep its memory from others, take memory back."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SET_PARENT_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE = 1, 3, 4  # of prctl(2)
_MMAP_THRESHOLD = -3  # of mallopt(3)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. ``parent``: its process."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def hidden_memory() -> Iterator[None]:
    """Leave no core dump, which would hold tokens, and let only root read this process's memory and environment."""
    before = _prctl(_GET_DUMPABLE)
    _prctl(_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        _prctl(_SET_DUMPABLE, before)


def map_blocks_of(num_bytes: int) -> None:
    """Let malloc map each block of so many bytes or more, so that a freed one goes back to the kernel at once.

    Otherwise glibc keeps what was freed of up to 32 MiB, with holes. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, num_bytes)


def _prctl(option: int, value: int = 0) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
