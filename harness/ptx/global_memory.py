"""The tensors that a launch may access, by their real addresses, and which thread wrote what.

Blocks run one after the other here, and at the same time on a GPU. So a thread that reads what another has written, or
writes another value there, is at fault, in whatever order it happens here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from harness.ptx.values import Fault, Values

_NOBODY = -1


@dataclass(eq=False)
class _Region:
    """The storage of a tensor. ``writers``: the thread that wrote a byte, once one has been written."""

    begin: int
    size: int
    content: Values
    name: str
    writers: Values | None = None


class GlobalMemory:
    """Memory of one launch."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._begins = self._sizes = np.zeros(0, np.uint64)

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Let kernels access a tensor's storage, all of it."""
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if not size or any(region.begin == begin for region in self._regions):
            return
        content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
        self._regions.append(_Region(begin, size, content, f"{name}, {tensor.dtype} {tuple(tensor.shape)}"))
        self._regions.sort(key=lambda region: region.begin)
        self._begins = np.array([region.begin for region in self._regions], np.uint64)
        self._sizes = np.array([region.size for region in self._regions], np.uint64)

    def load(self, addresses: Values, size: int, threads: Values) -> Values:
        """Return bytes, ``(accesses, size)``."""
        found = np.empty((len(addresses), size), np.uint8)
        for region, which, offsets in self._places(addresses, size, "load"):
            found[which] = region.content[offsets]
            if region.writers is not None:
                writers = region.writers[offsets]
                if ((writers != _NOBODY) & (writers != threads[which][:, None])).any():
                    raise Fault(f"a thread reads what another has written, in {region.name}")
        return found

    def store(self, addresses: Values, data: Values, threads: Values) -> None:
        """Write bytes, ``(accesses, size)``."""
        for region, which, offsets in self._places(addresses, data.shape[1], "store"):
            if region.writers is None:
                region.writers = np.full(region.size, _NOBODY, np.int64)
            values = data[which]
            own = np.broadcast_to(threads[which][:, None], offsets.shape)
            before = region.writers[offsets]
            if ((before != _NOBODY) & (before != own) & (region.content[offsets] != values)).any():
                raise Fault(f"a thread overwrites another's value in {region.name}")
            region.content[offsets] = values
            if (region.content[offsets] != values).any():
                raise Fault(f"two threads store different values at one place of {region.name}")
            region.writers[offsets] = own

    def _places(self, addresses: Values, size: int, what: str) -> list[tuple[_Region, Values, Values]]:
        """Return for each region which accesses lie in it, and their bytes' offsets, ``(accesses, size)``."""
        index = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        is_inside = (index >= 0) & (addresses + np.uint64(size) - self._begins[index] <= self._sizes[index])
        if not is_inside.all():
            raise Fault(f"{what} of {size} bytes {self._nearest(int(addresses[~is_inside][0]))}")
        if (odd := addresses % np.uint64(size) != 0).any():
            raise Fault(f"{what} of {size} bytes at the misaligned address {int(addresses[odd][0]):#x}")
        offsets = (addresses - self._begins[index]).astype(np.int64)[:, None] + np.arange(size)
        found = []
        for each in np.unique(index):
            which = index == each
            found.append((self._regions[each], which, offsets[which]))
        return found

    def _nearest(self, address: int) -> str:
        region = min(self._regions, key=lambda x: min(abs(address - x.begin), abs(address - x.begin - x.size)))
        return f"outside all tensors: {address - region.begin} from the first of {region.size} bytes of {region.name}"
