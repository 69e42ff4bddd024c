"""SGLang's token-to-KV pool on a GPU, read and restored in parallel with the forward pass.

The work runs on our own streams. Only events order them with SGLang's streams, so that no thread but our own waits on
the host. docs/device-mode-gpu.md explains the design.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from sgl_kvfetch.codec import CellPlace, Device, Fence, Quantiser, Stream
from sgl_kvfetch.codec.quant import Rotations, TransformInverse, scales_of
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plugin.device.cuda_reads import CudaRun, SlotReader
from sgl_kvfetch.plugin.device.klt_reads import CellOutputs, KltReads, PoolCell, open_klt_reads
from sgl_kvfetch.plugin.device.pages import SlotPages
from sgl_kvfetch.plugin.device.pinned_buffer import PinnedBuffer
from sgl_kvfetch.triton_kernels.klt_choice import choose_options
from sgl_kvfetch.triton_kernels.restore_klt import OPTIONS, VECTORS, KltModel, KltShape, compile_klt, klt_shape
from sgl_kvfetch.types import TENSORS

logger = logging.getLogger(__name__)

MiB = 1 << 20

READ_BUFFER_BYTES = 8 * MiB  # of pinned memory on the host, and as much on the device

_TABLES = 64  # kept: of rotations, 512 KiB each for a span of 1024 tokens, and of pixels, a few KiB
_ROTATED_SPANS = 32  # of which rotations are made at the start; each takes about a millisecond of a CPU
_POLL_S = 0.001  # events have no wait with a deadline


class CudaPages(SlotPages):
    """Pages of an ``MHATokenToKVPool`` on a GPU.

    The scheduler's thread opens a load, or reads, when it hands slots over, before work on them begins. Slots stay on
    the device: kernels take them from there when their turn comes, and no thread waits until SGLang has computed them.
    """

    device: Device

    def __init__(
        self,
        pool: Any,
        page_size: int,
        device: Device,
        forward_stream: Stream,
        *,
        read_buffer_bytes: int = READ_BUFFER_BYTES,
    ) -> None:
        """``forward_stream``: the stream of SGLang's model if the scheduler overlaps with it; otherwise the model runs
        on the scheduler's own stream. Raises UnsupportedError as `SlotPages` does."""
        super().__init__(pool, page_size)
        self.device = device
        self._forward_stream = forward_stream
        self._reads = device.new_stream()
        self._pool_streams = [self._reads]  # that use the pool
        self._read_buffer = PinnedBuffer(device, read_buffer_bytes)
        self._reader = SlotReader(device, self._reads, self._read_buffer, self._buffers, self._dtype)
        self._uploads = device.new_stream()
        self._lock = threading.Lock()  # guards the inverses and the tables
        self._tables: OrderedDict[tuple[Hashable, ...], torch.Tensor] = OrderedDict()
        self._inverses: dict[tuple[Quantiser, range, range], TransformInverse] = {}
        self._outputs_of: dict[tuple[range, range], CellOutputs] = {}
        self._models: dict[tuple[range, range], tuple[Quantiser, KltModel]] = {}
        self._compiled: set[Hashable] = set()
        self.klt_options = OPTIONS[0]  # of restores
        # A team of OpenMP threads would spin.
        self._rotating = ThreadPoolExecutor(1, "kvfetch-rotate", use_one_thread)
        self._klt_reads: KltReads | None = None
        self.quantiser: Quantiser | None = None  # that of the store, once it is known

    # Ordering, on the scheduler's thread

    def open_reads(self, slots: torch.Tensor) -> CudaRun:
        there, page_size = slots.to(torch.int64), self.geometry.page_size
        self._fence(self._reads, there)  # a forward pass under way may compute what will be read
        klt = self._klt_reads
        run = None if klt is None else klt.open(there, self._reader.read_all, page_size)
        return CudaRun(self._reader, there, page_size, run)

    def _fence(self, stream: Stream, slots: torch.Tensor) -> None:
        for fence in self.fences():
            stream.wait_event(fence)
        self.device.used_on(slots, stream)

    def new_stream(self) -> Stream:
        """Return a stream for work on the pool beside the forward pass, such as a load."""
        self._pool_streams.append(self.device.new_stream())
        return self._pool_streams[-1]

    def open_load(self, slots: torch.Tensor, num_before: int = 0) -> torch.Tensor:
        """Return ``slots`` behind ``num_before`` that are skipped, int64 on the device. Call this on the scheduler's
        thread; nobody may use the result before `fences`, or forget it before the work with it is done."""
        there = slots.to(torch.int64)
        return torch.cat([there.new_full((num_before,), -1), there]) if num_before else there

    def fences(self) -> list[Fence]:
        """Return the points after everything that the scheduler's thread and the model were given to compute so
        far. Call this on the scheduler's thread."""
        return [self.device.current_stream().record_event(), self._forward_stream.record_event()]

    def wait_until_unused(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        events = [self.device.mark(stream) for stream in self._pool_streams]
        while not all(event.query() for event in events):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    # Restoring

    def layer_buffers(self, layer: int) -> list[torch.Tensor]:
        """Return K's and V's buffer of a layer, ``(slots, heads, dim)`` of raw values."""
        return [self._buffers[tensor][layer] for tensor in TENSORS]

    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        self.quantiser = quantiser
        if not quantiser.gpu_restores:
            return
        first, *others = places
        inverse = self._inverse(quantiser, first)
        for place in others:
            self._inverse(quantiser, place)
        if inverse.rotations is not None:
            num_tokens = len(first.tokens)
            for token in range(0, _ROTATED_SPANS * num_tokens, num_tokens):
                self.rotations_of(inverse.rotations, range(token, token + num_tokens))
        model = self.klt_model(quantiser, first, range(len(first.layers)), range(len(first.heads)))
        with self.device.launching(self._uploads) as launch:
            kind = model.shape, model.dtype
            if kind not in self._compiled:
                self._compiled.add(kind)
                launch(partial(self._compile, *kind, model.num_coefficients))

    def _compile(self, shape: KltShape, dtype: torch.dtype, coefficients: int) -> None:
        device = self.device.torch_device
        if device.type == "cuda":
            self.klt_options, about = choose_options(shape, dtype, coefficients, device)
            logger.info("kvfetch: %s", about)
        no_slots = torch.empty(0, dtype=torch.int64, device=device)
        for vector in VECTORS:
            compile_klt(shape, dtype, vector, self.klt_options, no_slots)

    def _inverse(self, quantiser: Quantiser, place: CellPlace) -> TransformInverse:
        """Return the inverse of a cell's quantiser. Its tensors stay on the device, for later cells."""
        key = quantiser, place.layers, place.heads
        with self._lock:
            if key not in self._inverses:
                for other in [k for k in self._inverses if k[0] is not quantiser]:  # of an earlier attachment
                    del self._inverses[other]
                self._inverses[key] = self.device.upload(quantiser.inverse_of(place), self._uploads)
            return self._inverses[key]

    def klt_model(self, quantiser: Quantiser, place: CellPlace, layers: range, heads: range) -> KltModel:
        """Return what restores of a cell need, whatever it holds. ``layers``, ``heads``: as in `CodedCell`."""
        key = layers, heads
        of_quantiser, model = self._models.get(key, (None, None))
        if of_quantiser is not quantiser or model is None:
            model = self._make_model(quantiser, place, *self._outputs(layers, heads))
            self._models[key] = quantiser, model
        return model

    def _make_model(
        self, quantiser: Quantiser, place: CellPlace, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]
    ) -> KltModel:
        """``k`` and ``v``: each layer's buffer, reduced to the cell's heads."""
        inverse = self._inverse(quantiser, place)
        x, layers = inverse.rotations, quantiser.cell_layers
        shape = klt_shape(k[0], v[0], layers)
        if x is not None:
            of_k = {"interleaved": x.interleaved, "mixed": len(x.ropes) > 1}
            shape = klt_shape(k[0], v[0], layers, x.rotary_dim, **of_k)
        scales = self.resident(_steps, inverse.step)
        return KltModel(shape, inverse.matrix.contiguous(), inverse.mean, scales, k, v, inverse.turns)

    def resident(self, function: Callable[..., torch.Tensor], *args: Hashable) -> torch.Tensor:
        """Return ``function(*args)`` on the device, which keeps the latest such tables for later cells."""
        with self._lock:
            table = self._tables.pop((function, *args), None)
            if table is None:
                table = self.device.upload(function(*args), self._uploads)
            self._tables[function, *args] = table
            if len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        return table

    def rotations_of(self, rotations: Rotations, tokens: range) -> torch.Tensor:
        """Return ``rotations.table`` of a span, on the device."""
        return self.resident(self._rotation, rotations.table, tokens.start, len(tokens))

    def _rotation(self, table: Callable[[int, int], torch.Tensor], first_token: int, num_tokens: int) -> torch.Tensor:
        return self._rotating.submit(table, first_token, num_tokens).result()

    def _outputs(self, layers: range, heads: range) -> CellOutputs:
        """Return K's and V's buffers of some layers, reduced to some heads, both counted from the pool's first."""
        key = layers, heads
        if key not in self._outputs_of:
            of_layers, of_heads = (slice(x.start, x.stop) for x in key)
            k, v = ([x[:, of_heads] for x in self._buffers[t][of_layers]] for t in TENSORS)
            self._outputs_of[key] = k, v
        return self._outputs_of[key]

    # Writing to the store

    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        if self._klt_reads is not None:
            self._klt_reads.close()
        self._klt_reads = None
        if not quantiser.gpu_quantises:
            return
        cells: list[PoolCell] = []
        for place in places:
            first_head = cells[0].place.heads.start if cells else place.heads.start
            layers = range(place.layers.start - self.first_layer, place.layers.stop - self.first_layer)
            heads = range(place.heads.start - first_head, place.heads.stop - first_head)
            cells.append(PoolCell(place, layers, heads, self._outputs(layers, heads)))
        self._klt_reads, result = open_klt_reads(self.device, self._reads, quantiser, cells)
        logger.info("kvfetch: %s", result)


def _steps(step: float) -> torch.Tensor:
    return scales_of(torch.arange(256, dtype=torch.uint8)) * step
