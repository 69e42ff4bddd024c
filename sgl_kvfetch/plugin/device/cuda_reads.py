"""Reads pages of SGLang's pool on a GPU back to the host, on their way to the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from sgl_kvfetch.codec import CellValues, Device, Stream
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.plane import consecutive_runs
from sgl_kvfetch.plugin.device.klt_reads import KltRun
from sgl_kvfetch.plugin.device.pages import PageRun
from sgl_kvfetch.plugin.device.pinned_buffer import PinnedBuffer
from sgl_kvfetch.types import TENSORS, TensorName

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


class SlotReader:
    """Copies slots of a pool to the host, through pinned memory, on a stream of its own. Thread-safe."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        pinned: PinnedBuffer,
        buffers: Mapping[TensorName, Sequence[torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """``buffers``: those of K and V, one a layer: ``(slots, heads, dim)`` of raw values. ``dtype``: what these
        are."""
        self._device, self._stream, self._pinned = device, stream, pinned
        self._buffers, self._dtype = buffers, dtype

    def read(self, tensor: TensorName, slots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of some slots, ``(tokens, layers, heads, dim)``. Waits for the device. ``slots``: int64 on the
        device, one after another."""
        buffers = self._buffers[tensor]
        shape = sum(map(len, slots)), len(buffers), *buffers[0].shape[1:]
        rows = torch.empty(shape, dtype=buffers[0].dtype)
        at_once = self._pinned.num_bytes // (len(buffers) * buffers[0][0].nbytes)
        assert at_once, "the read buffer has no room for a token"
        end = 0
        for each in slots:
            for first in range(0, len(each), at_once):
                part = each[first : first + at_once]
                self._read(buffers, part, rows[end : end + len(part)])
                end += len(part)
        return rows.view(self._dtype)

    def read_all(self, slots: torch.Tensor) -> CellValues:
        """Return K and V of some slots, as `read` does."""
        return CellValues(*(self.read(tensor, [slots]) for tensor in TENSORS))

    def _read(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
        with self._pinned.lend(out.nbytes) as lent:
            host, device = (x.view(out.dtype).view(out.transpose(0, 1).shape) for x in lent)

            def gather() -> None:
                for index, layer in enumerate(buffers):
                    torch.index_select(layer, 0, slots, out=device[index])
                host.copy_(device, non_blocking=True)

            self._device.launch(self._stream, gather)
            self._device.mark(self._stream).synchronize()
            out.copy_(host.transpose(0, 1))


class CudaRun(PageRun):
    """A run of pages on a GPU. ``klt`` quantises them there, if the GPU can."""

    def __init__(self, reader: SlotReader, slots: torch.Tensor, page_size: int, klt: KltRun | None) -> None:
        self._reader, self._slots, self._page_size, self._klt = reader, slots, page_size, klt
        self.num_rows = () if klt is None else klt.num_rows

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Waits for the device."""
        size = self._page_size
        runs = [self._slots[run.start * size : run.stop * size] for run, _ in consecutive_runs(pages)]
        rows = self._reader.read(tensor, runs)
        return rows.view(len(pages), size, *rows.shape[1:])

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        if self._klt is None:
            return None
        try:
            return self._klt.quantise(first_page, pages, memory, offset)
        except Exception as e:  # a compiler and a driver fail in many ways
            _limited.warning("quantise", f"pages are quantised on the CPU: {brief(e)}")
            return None
