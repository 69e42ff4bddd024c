"""Shared memory that is pinned piece by piece, when a copy first needs it, or before.

That of loads is as large as the KV pool, so that one prompt of any length fits, but little of it is in use. Pinning all
of it would take that memory from the host, and a load that pins waits: 5 ms for a piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from sgl_kvfetch.codec import Device

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20


class PinnedMemory:
    """Any thread may pin, one piece at a time. ``whole``: the shared memory of one data plane."""

    def __init__(self, device: Device, whole: torch.Tensor) -> None:
        self._device = device
        self.whole = whole
        self._pinned: dict[int, torch.Tensor] = {}  # pieces, by number
        self._is_refused = self._is_closed = False
        self._lock = threading.Lock()

    def copy_of(self, x: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        """Pin ``x``, contiguous and in this memory. Return what launches its copy to ``into``, on the device. If it
        cannot be pinned, the copy waits for the device, and is slow."""
        return partial(_copy_all, list(self._pinned_parts(x, into)))

    def copy_into(self, x: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """The same for a copy to ``x`` of ``source``, which is on the device."""
        return partial(_copy_all, [(theirs, ours) for ours, theirs in self._pinned_parts(x, source)])

    def _pinned_parts(self, x: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        begin = x.data_ptr() - self.whole.data_ptr()
        ours, theirs = (each.view(-1).view(torch.uint8) for each in (x, other))
        for number, part in _pieces(begin, begin + x.nbytes):
            self.pin(number)
            there = slice(part.start - begin, part.stop - begin)
            yield ours[there], theirs[there]

    def pieces(self, begin: int, end: int) -> Sequence[int]:
        """Return the numbers of the pieces in which some bytes lie."""
        return range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)) if begin < end else ()

    def pin_all(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Pin the pieces in which these ranges of bytes lie."""
        ranges = zip(begins.tolist(), ends.tolist(), strict=True)
        for number in sorted({number for begin, end in ranges for number in self.pieces(begin, end)}):
            self.pin(number)

    def pin(self, number: int) -> None:
        """Pin a piece, unless it is pinned or the memory is not used any more."""
        with self._lock:
            if self._is_refused or self._is_closed or number in self._pinned:
                return
            piece = self.whole[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            try:
                self._device.pin(piece)
            except RuntimeError as error:
                self._is_refused = True
                logger.warning("kvfetch: shared memory cannot be pinned, so copies to the GPU are slow: %s", error)
            else:
                self._pinned[number] = piece

    def unpin(self) -> None:
        """Unpin everything, and pin no more. Call this when no copy is under way."""
        with self._lock:
            self._is_closed = True
            for piece in self._pinned.values():
                self._device.unpin(piece)
            self._pinned.clear()


def copy(into: torch.Tensor, x: torch.Tensor) -> None:
    into.copy_(x, non_blocking=True)


def _copy_all(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, into in parts:
        copy(into, x)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, slice]]:
    """Yield the numbers of the pieces that bytes ``begin`` to ``end`` lie in, and which of them lie there: a copy must
    not reach from one pinned range into another."""
    while begin < end:
        number = begin // PIECE_BYTES
        stop = min(end, (number + 1) * PIECE_BYTES)
        yield number, slice(begin, stop)
        begin = stop
