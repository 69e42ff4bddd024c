"""The shared memory of a block, and whether warps pass data through it as they must.

Time counts barriers. A byte that a warp wrote since the last barrier may be read or written by that warp alone, and one
that a warp read since then may be written by it alone. ``cp.async`` writes when its group is waited for; until then
nobody may touch its bytes. ``wgmma`` reads until its group is waited for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.ptx.values import Fault, Values

_NOBODY, _SEVERAL = -1, -2


class _Copy(NamedTuple):
    places: Values
    data: Values
    warps: Values


class SharedMemory:
    """Shared memory of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.content = np.full(size, 0xCD, np.uint8)
        self._time = 0
        self._writers, self._written = np.full(size, _NOBODY, np.int32), np.full(size, _NOBODY, np.int32)
        self._readers, self._read = np.full(size, _NOBODY, np.int32), np.full(size, _NOBODY, np.int32)
        self._in_flight = np.zeros(size, np.int32)  # copies that write a byte
        self._copies: list[_Copy] = []  # of the group that is still open
        self._copy_groups: list[list[_Copy]] = []
        self._multiplied = np.zeros(size, np.int32)  # instructions of `wgmma` that read a byte
        self._products: list[Values] = []
        self._product_groups: list[list[Values]] = []

    def barrier(self) -> None:
        self._time += 1

    def places(self, addresses: Values, size: int) -> Values:
        """Return the places of accesses' bytes, ``(accesses, size)``."""
        first = addresses.astype(np.int64)
        if (odd := first % size != 0).any():
            raise Fault(f"shared access of {size} bytes at {int(first[odd][0])}: misaligned")
        if (first < 0).any() or (first + size > len(self.content)).any():
            raise Fault(f"shared access of {size} bytes at {int(first.max())}, of {len(self.content)}")
        places: Values = first[:, None] + np.arange(size)
        return places

    def read(self, places: Values, warps: Values) -> Values:
        own = np.broadcast_to(warps[:, None], places.shape)
        self._require_written(places)
        if ((self._writers[places] != own) & (self._written[places] == self._time)).any():
            raise Fault("shared memory is read before a barrier after another warp's write")
        flat, reader = places.ravel(), own.ravel()
        is_shared = (self._read[flat] == self._time) & (self._readers[flat] != reader)
        self._readers[flat] = np.where(is_shared, _SEVERAL, reader)
        self._read[flat] = self._time
        found: Values = self.content[places]
        return found

    def write(self, places: Values, data: Values, warps: Values) -> None:
        self._require_free(places, warps)
        self._put(places, data, warps)

    def copy(self, places: Values, data: Values, warps: Values) -> None:
        """Begin an asynchronous copy, in the open group."""
        self._require_free(places, warps)
        if self._in_flight[places].any():
            raise Fault("cp.async writes where another copy is in flight")
        self._in_flight[places] += 1
        self._copies.append(_Copy(places, data, warps))

    def commit_copies(self) -> None:
        self._copy_groups.append(self._copies)
        self._copies = []

    def wait_copies(self, num_left: int) -> None:
        while len(self._copy_groups) > num_left:
            for copy in self._copy_groups.pop(0):
                self._in_flight[copy.places] -= 1
                self._put(*copy)

    def multiply(self, places: Values) -> Values:
        """Return what a ``wgmma`` reads, which has to stay until the group is waited for. All warps may have written
        it, but before the last barrier."""
        self._require_written(places)
        if (self._written[places] == self._time).any():
            raise Fault("wgmma reads shared memory that was written since the last barrier")
        read = np.unique(places)
        self._multiplied[read] += 1
        self._products.append(read)
        found: Values = self.content[places]
        return found

    def commit_products(self) -> None:
        self._product_groups.append(self._products)
        self._products = []

    def wait_products(self, num_left: int) -> None:
        while len(self._product_groups) > num_left:
            for read in self._product_groups.pop(0):
                self._multiplied[read] -= 1

    def _require_written(self, places: Values) -> None:
        if self._in_flight[places].any():
            raise Fault("shared memory is read while cp.async is in flight")
        if (self._writers[places] == _NOBODY).any():
            raise Fault("shared memory is read that nothing wrote")

    def _require_free(self, places: Values, warps: Values) -> None:
        own = warps[:, None]
        if ((self._read[places] == self._time) & (self._readers[places] != own)).any():
            raise Fault("shared memory is overwritten before a barrier after another warp's read")
        if ((self._written[places] == self._time) & (self._writers[places] != own)).any():
            raise Fault("shared memory is written by two warps without a barrier")
        if self._multiplied[places].any():
            raise Fault("shared memory is overwritten while wgmma reads it")

    def _put(self, places: Values, data: Values, warps: Values) -> None:
        self.content[places] = data
        if (self.content[places] != data).any():
            raise Fault("two threads write different values at one place of shared memory")
        self._writers[places] = np.broadcast_to(warps[:, None], places.shape)
        self._written[places] = self._time
