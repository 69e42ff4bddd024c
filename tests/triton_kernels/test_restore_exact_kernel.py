"""`restore_exact`, and `ans_decode` of `ans-tables`, beside the CPU's decoder: hostile values, bit for bit.

KVFETCH_EXACT_CASES is the number of cells that are tried.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream.ans import DISTRIBUTION_BYTES, SLOTS, AnsTablesCodec, decode_fitted, read_tables
from sgl_kvfetch.codec.layout.frames import FILL
from sgl_kvfetch.codec.quant.base import to_planes
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import FittedChunk, fitted_decode_table
from sgl_kvfetch.triton_kernels.restore_exact import (
    ALIGNMENT,
    exact_rows,
    exact_shape,
    fault_on_gpu,
    launch_exact,
    outputs_of,
)
from tests.codec.quant.hostile import hostile
from tests.triton_kernels.cases import DEVICE, FLOATS, assert_same_bits, integer_view, poisoned

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("KVFETCH_EXACT_CASES", "250"))
DECODED_EVERY = 25  # the interpreter takes milliseconds for each row
MARGIN = 16  # bytes around what is decoded, which nobody may write to
NUM_SLOTS = 96


@dataclass
class Span:
    """A cell of hostile values in pages of ``page_size`` tokens, in a pool of its own. Some pages have no slot."""

    seed: int
    is_small: bool = False  # of one head of few values
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        pick, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        self.dtype = FLOATS[self.seed % len(FLOATS)]
        self.layers, self.heads, self.page_size = pick.randint(1, 3), pick.randint(1, 3), pick.choice([1, 3, 4, 16])
        self.tokens = self.page_size * pick.randint(1, 48 // self.page_size)
        # K and V have other sizes with MLA, and lie in one buffer.
        self.is_mla = pick.random() < 0.2
        k, v = (8, 40) if self.is_mla else [pick.choice([8, 16, 24, 80])] * 2
        if self.is_small:
            k = v = 8
        self.heads = 1 if self.is_mla or self.is_small else self.heads
        kind = pick.choice(["bits", "special", "constant", "usual"])
        self.values = [
            hostile((self.tokens, self.layers, self.heads, dim), self.dtype, kind, generator) for dim in (k, v)
        ]
        self.planes = [plane for x in self.values for plane in to_planes(x)]
        sizes = [(1, k + v)] if self.is_mla else [(self.heads + 2, k), (self.heads + 2, v)]
        self.memory = [poisoned(self.layers, NUM_SLOTS, *size, dtype=self.dtype) for size in sizes]
        self.buffers = [list(x) for x in self._views(self.memory)]
        num_pages = self.tokens // self.page_size
        self.first = first = torch.randperm(NUM_SLOTS // self.page_size, generator=generator)[: max(1, num_pages - 1)]
        self.slots = (first[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        # Of the span's pages: which of the load's, in any order; one is left out, and one is behind the last slot.
        pages = [*range(len(first)), *([-1, len(first)] * num_pages)][:num_pages]
        pick.shuffle(pages)
        self.pages = torch.tensor(pages, dtype=torch.int32, device=DEVICE)

    def _views(self, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the cell's heads in buffers of all heads, of K and V: ``(layers, slots, heads, dim)``."""
        if self.is_mla:
            v = self.values[1].shape[-1]
            return [memory[0][..., v:], memory[0][..., :v]]
        return [x[:, :, 1 : 1 + self.heads] for x in memory]

    def expected(self) -> list[torch.Tensor]:
        """Return what the memory must be: what the CPU writes, in slots of this cell alone."""
        memory = [x.cpu().clone() for x in self.memory]
        pages = [x.unflatten(1, (-1, self.page_size)).permute(1, 2, 0, 3, 4) for x in self._views(memory)]
        places = [int(self.first[page]) if 0 <= page < len(self.first) else -1 for page in self.pages]
        make_quantiser("exact").restore_pages(tuple(self.planes), pages, places)
        return memory

    def restore(self, planes: Sequence[torch.Tensor]) -> None:
        shape = exact_shape(*self.buffers, 3)
        cells = {
            "tokens": np.array([self.tokens]),
            "pages": np.array([self.pages.data_ptr()]),
            "planes": np.array([[x.data_ptr() for x in planes]]),
            "outputs": np.array([0]),
        }
        rows = torch.from_numpy(exact_rows(shape, cells, [outputs_of(shape, *self.buffers)]))
        launch_exact(shape, rows.to(DEVICE), self.slots.to(DEVICE), self.page_size, self.tokens, self.heads)


def aligned(plane: torch.Tensor) -> torch.Tensor:
    """Return a copy at a multiple of `ALIGNMENT`, as planes lie in scratch memory."""
    memory = torch.empty(plane.numel() + ALIGNMENT, dtype=torch.uint8, device=DEVICE)
    copy = memory[-memory.data_ptr() % ALIGNMENT :][: plane.numel()]
    return copy.copy_(plane.flatten())


@dataclass
class Coded:
    """Planes in `ans-tables`, one behind the other from an odd byte on, and places for them with margins between."""

    data: bytearray = field(default_factory=lambda: bytearray(b"\x5a"))
    slots: bytearray = field(default_factory=bytearray)
    chunks: list[FittedChunk] = field(default_factory=list)
    num_bytes: int = MARGIN

    def add(self, bitstream: bytes, tokens: int, rows: int, kept: int) -> None:
        found, coded = read_tables(bitstream)
        where = len(self.slots), len(found), sum(chunk.num_tables for chunk in self.chunks)
        self.chunks.append(FittedChunk(len(self.data), len(coded), rows, tokens, self.num_bytes, kept, *where))
        self.slots += found.tobytes()
        self.data += bytes(coded) + b"\x5a" * (1 + len(self.chunks) % 2)
        self.num_bytes += -(-tokens * kept // MARGIN) * MARGIN + MARGIN

    def decoded(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return each chunk's status and integers, after checking that nothing else was written."""
        memory = poisoned(self.num_bytes + ALIGNMENT, dtype=torch.uint8)
        out = memory[-memory.data_ptr() % ALIGNMENT :][: self.num_bytes]
        tables = torch.empty((sum(x.num_tables for x in self.chunks), SLOTS), dtype=torch.int32, device=DEVICE)
        status = torch.zeros(len(self.chunks), dtype=torch.int32, device=DEVICE)
        data, slots = (torch.frombuffer(x + b"\0", dtype=torch.uint8).to(DEVICE) for x in (self.data, self.slots))
        rows = torch.tensor(self.chunks, dtype=torch.int64, device=DEVICE)
        slots = slots[: len(self.slots)]
        fitted_decode_table(data, rows, max(x.tokens for x in self.chunks), slots, tables, out, status)
        found = [out[x.out_start :][: x.tokens * x.kept].clone() for x in self.chunks]
        for chunk in self.chunks:
            out[chunk.out_start :][: chunk.tokens * chunk.kept] = 0xAB
        assert bool((out == 0xAB).all())
        return status.tolist(), found


def frames_of(plane: torch.Tensor) -> torch.Tensor:
    """Return flat frames of three layers, as `TileLayout` makes them."""
    tokens, layers, heads, dim = plane.shape
    frames = torch.full((tokens, 3, 1, heads * dim), FILL, dtype=torch.uint8)
    frames[:, :layers, 0] = plane.flatten(2)
    return frames


def assert_restored(span: Span, *, is_decoded: bool = False) -> None:
    """``is_decoded``: whether the exponents are decoded by the kernel, too."""
    expected, planes = span.expected(), [plane.flatten() for plane in span.planes]
    if is_decoded:
        coded, size = Coded(), span.dtype.itemsize
        for plane in span.planes[size - 1 :: size]:
            frames = frames_of(plane)
            coded.add(AnsTablesCodec().encode(frames), span.tokens, frames[0].numel(), plane[0].numel())
        status, found = coded.decoded()
        assert not any(status)
        assert all(torch.equal(x, y.to(DEVICE)) for x, y in zip(found, planes[size - 1 :: size], strict=True))
        planes[size - 1 :: size] = found
    span.restore([aligned(plane) for plane in planes])
    for x, y in zip(span.memory, expected, strict=True):
        assert_same_bits(integer_view(x.cpu()), integer_view(y))


def test_any_bits_come_back_and_nothing_else_is_written() -> None:
    for seed in range(CASES):
        is_decoded = seed % DECODED_EVERY == 0
        assert_restored(Span(seed, is_small=is_decoded), is_decoded=is_decoded)


def of_two_kinds(tokens: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return frames whose rows have several distributions: exponents, and a few that are noise, most of it escaped."""
    frames = 120 + (2 * torch.randn((tokens, 3, 1, rows // 3), generator=generator)).round()
    frames[:, 1] += 40
    noisy = torch.randint(0, 256, (tokens, 1, rows // 3), generator=generator)
    frames[:, 2, :, ::7] = noisy[..., ::7].float()
    return frames.clamp(0, 255).to(torch.uint8)


def assert_decoded(shapes: Sequence[tuple[int, int, int]]) -> None:
    """``shapes``: tokens, rows, and those that are kept."""
    generator, coded, expected = torch.Generator().manual_seed(0), Coded(), []
    for tokens, rows, kept in shapes:
        frames = of_two_kinds(tokens, rows, generator)
        coded.add(AnsTablesCodec().encode(frames), tokens, rows, kept)
        expected.append(frames.flatten(1)[:, :kept].flatten())
    status, found = coded.decoded()
    assert status == [0] * len(expected)
    assert all(torch.equal(x, y.to(DEVICE)) for x, y in zip(found, expected, strict=True))


def test_the_native_decoders_integers_at_any_number_of_tokens() -> None:
    """In one launch, with several distributions and groups, and without the last rows."""
    assert_decoded([(1, 24, 8), (31, 24, 24), (130, 48, 32), (260, 48, 40)])


def verdict(coded: Coded, chunk: FittedChunk) -> torch.Tensor | None:
    slots = coded.slots[chunk.slots_start :][: chunk.num_tables * DISTRIBUTION_BYTES]
    bitstream = bytes(coded.data[chunk.start : chunk.start + chunk.size])
    try:
        found = decode_fitted(np.frombuffer(slots, "<u2").reshape(-1, 257), bitstream, chunk.tokens, chunk.rows)
    except CorruptError:
        return None
    return found[:, : chunk.kept].flatten()


@pytest.mark.parametrize("is_interpreted", [True, False], ids=["kernel", "reference"])
def test_broken_bitstreams_are_broken_for_both_and_touch_nothing_else(
    is_interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut, lengthened, and with changed bytes; sound ones lie between them."""
    monkeypatch.setattr(runtime, "INTERPRETED", is_interpreted)
    pick, generator, coded = np.random.default_rng(3), torch.Generator().manual_seed(1), Coded()
    for tokens in (2, 33):
        bitstream = AnsTablesCodec().encode(of_two_kinds(tokens, 24, generator))
        begin = len(bitstream) - len(read_tables(bitstream)[1])
        add = partial(coded.add, tokens=tokens, rows=24, kept=16)
        add(bitstream)
        for size in (begin, begin + 1, begin + 4, (begin + len(bitstream)) // 2, len(bitstream) - 1):
            add(bitstream[:size])
        add(bitstream + b"\0\0")
        for _ in range(3):
            bad = np.frombuffer(bitstream, np.uint8).copy()
            bad[pick.integers(begin, len(bad), 2)] ^= pick.integers(1, 256, 2).astype(np.uint8)
            add(bad.tobytes())
        add(bitstream)
    status, found = coded.decoded()
    verdicts = [verdict(coded, chunk) for chunk in coded.chunks]
    assert status == [int(each is None) for each in verdicts]
    assert 8 < sum(status) < len(status)
    for expected, integers in zip(verdicts, found, strict=True):
        assert expected is None or torch.equal(integers, expected.to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_trial_decides_at_the_start(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_kvfetch.triton_kernels import restore_exact

    monkeypatch.setattr(runtime, "INTERPRETED", False)  # the decoder's reference runs
    buffers = [poisoned(4, 3, 16, dtype=dtype)]
    shape = exact_shape(buffers, buffers, 3)
    assert not fault_on_gpu(DEVICE, shape)

    def wrong(data: torch.Tensor, *args: torch.Tensor) -> None:
        fitted_decode_table(data, *args)
        args[-2][7] ^= 1

    def broken(data: torch.Tensor, *args: torch.Tensor) -> None:
        args[-1][1] = 1

    for decode, fault in ((wrong, "other values"), (broken, "does not decode")):
        monkeypatch.setattr(restore_exact, "fitted_decode_table", decode)
        assert fault in fault_on_gpu(DEVICE, shape)
