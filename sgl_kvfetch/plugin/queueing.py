"""Copies pages out of one of SGLang's pools and queues them for writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sgl_kvfetch.dataplane.plane import DataPlane
from sgl_kvfetch.types import TENSORS, TensorName

_WAIT_S = 1.0  # how long to wait for room in the queue

ReadPages = Callable[[TensorName, Sequence[int]], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of a sequence, and their page numbers in the pool."""

    first_page: int  # position in the sequence
    previous_hash: bytes | None  # hash of the page before, None at the sequence's start
    page_hashes: Sequence[bytes]
    pool_pages: Sequence[int]


def queue_pages(plane: DataPlane, run: PageRun, read: ReadPages) -> int:
    """Queue pages for writing. Return how many, from the first on, were queued. Waits a little for room.

    ``read`` returns a copy of pages of the pool, or None if they are no longer available.
    """
    deadline_s = time.monotonic() + _WAIT_S
    step = plane.most_pages()
    previous_hash = run.previous_hash
    for first in range(0, len(run.page_hashes), step):
        hashes = run.page_hashes[first : first + step]
        copy = partial(_copy, read, run.pool_pages[first : first + step])
        if not plane.write(
            run.first_page + first, previous_hash, hashes, copy, max(0.0, deadline_s - time.monotonic())
        ):
            return first
        previous_hash = hashes[-1]
    return len(run.page_hashes)


def _copy(read: ReadPages, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> bool:
    for tensor, into in zip(TENSORS, (k, v), strict=True):
        values = read(tensor, pages)
        if values is None:
            return False
        into.copy_(values)
    return True
