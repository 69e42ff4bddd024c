"""Copies pages out of one of SGLang's pools, and queues them for writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.types import TENSORS, TensorName
from sgl_kvfetch.write.gather import PageBatch
from sgl_kvfetch.write.writer import Writer

_WAIT_S = 1.0  # for room in the queue
_PIECES = 4  # pages go into the queue in pieces of at most so much of it

ReadPages = Callable[[TensorName, Sequence[int]], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of a sequence, and where they are."""

    first_page: int  # position in the sequence
    previous_hash: bytes | None  # of the page before, None at the sequence's start
    page_hashes: Sequence[bytes]
    pool_pages: Sequence[int]


def queue_pages(writer: Writer, run: PageRun, read: ReadPages, *, page_bytes: int, queue_bytes: int) -> int:
    """Returns how many pages, from the first on, were queued. Waits a little for room.

    ``read`` copies pages of the pool; None: they are not to be had any more.
    """
    deadline_s = time.monotonic() + _WAIT_S
    step = max(1, queue_bytes // _PIECES // page_bytes)
    previous_hash = run.previous_hash
    for first in range(0, len(run.page_hashes), step):
        hashes = run.page_hashes[first : first + step]
        num_bytes = len(hashes) * page_bytes
        if not writer.reserve(num_bytes, max(0.0, deadline_s - time.monotonic())):
            return first
        is_queued = False
        try:
            pieces = {tensor: read(tensor, run.pool_pages[first : first + step]) for tensor in TENSORS}
            values = {tensor: [piece] for tensor, piece in pieces.items() if piece is not None}
            if len(values) < len(TENSORS):
                return first
            writer.submit(PageBatch(run.first_page + first, previous_hash, hashes, values))
            is_queued = True
        finally:
            if not is_queued:
                writer.release(num_bytes)
        previous_hash = hashes[-1]
    return len(run.page_hashes)
