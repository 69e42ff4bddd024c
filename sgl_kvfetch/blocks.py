"""Large blocks of memory, for bytes on their way to a store.

A fresh page costs the kernel more than copying a page does: it clears it, and a virtual machine may have to ask its
host for it. Freed blocks of malloc's go back to the kernel, so that each segment would pay for all of its pages again.
So blocks are mapped in huge pages, where the kernel has them, and freed ones are kept for the next, until `drop_kept`.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch

_UNIT = 2 << 20  # a huge page
_LEAST_BYTES = 1 << 20  # smaller ones are malloc's
_MOST_KEPT_BYTES = 512 << 20  # after they were freed

# Reentrant: the garbage collector may free a block while its thread takes another one.
_lock = threading.RLock()
_kept: list[mmap.mmap] = []  # the last freed one last: its pages are most likely in the CPU's cache


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a tensor on the host with arbitrary content. Its memory is free when no tensor refers to it any longer."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    block = _take(-(-num_bytes // _UNIT) * _UNIT)
    array = np.frombuffer(block, np.uint8, num_bytes)
    # Tensors refer to the array, and the array to the block.
    weakref.finalize(array, _keep, block).atexit = False
    return torch.from_numpy(array).view(dtype).view(shape)


def drop_kept() -> None:
    """Give freed blocks back to the kernel: call this when nothing is on its way to a store."""
    with _lock:
        _kept.clear()


def _take(size: int) -> mmap.mmap:
    with _lock:
        for i in reversed(range(len(_kept))):
            if size <= len(_kept[i]) <= 2 * size:
                return _kept.pop(i)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _keep(block: mmap.mmap) -> None:
    with _lock:
        _kept.append(block)
        while sum(map(len, _kept)) > _MOST_KEPT_BYTES:
            _kept.pop(0)
