"""``restore`` and its reference against what the quantisers ``exact``, ``uint8`` and ``cachegen`` give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.layout.tiles import TileLayout, tile_layout
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised, Quantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.symmetric import SymmetricQuantiser
from sgl_kvfetch.errors import FormatError, UnsupportedError
from sgl_kvfetch.triton_kernels.restore import restore, restore_reference
from tests.triton_kernels.cases import (
    DEVICE,
    FLOATS,
    NUM_SLOTS,
    SMALL,
    Shape,
    assert_same_bits,
    make_buffers,
    poisoned,
    scattered_slots,
    shape_id,
)

Name = Literal["exact", "uint8", "cachegen"]

FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
# Every quantiser with every dtype that it takes.
KINDS: list[tuple[Name, torch.dtype]] = [
    *(("uint8", dtype) for dtype in FLOATS),
    *(("cachegen", dtype) for dtype in FLOATS),
    *(("exact", dtype) for dtype in (*FLOATS, *FLOAT8S)),
]
FIRST_LAYER = 9  # cachegen's K bins change after layer 9, so one cell has different centres

LATENT = Shape(tokens=21, layers=2, heads=1, dim=576)  # SGLang's ``MLATokenToKVPool``: kv_lora_rank + qk_rope_head_dim
PACKED_LATENT = Shape(tokens=21, layers=2, heads=1, dim=656)  # the same of sparse attention in fp8: bytes, with scales
ODD_SHAPES = [
    Shape(1, 1, 1, 48),
    Shape(63, 3, 8, 128),
    Shape(500, 1, 1, 64),
    Shape(500, 1, 3, 96),
    Shape(1000, 2, 1, 48),
    Shape(63, 1, 7, 256),
    Shape(7, 1, 128, 64),
    Shape(63, 1, 1, 52),  # no power of two above 4 divides it
]

# Room left everywhere: in a tile for a head and for dims, in the picture on both sides, and few tiles a frame. SMALL
# takes two frames of 56 tiles.
WASTEFUL = TileLayout(width=152, height=144, head_rows=2, head_cols=2, dim_rows=9, dim_cols=10)


def reference(
    frames: Any, layout: Any, slots: Any, outputs: Any, *, scales: Any = None, centres: Any = None, first_frame: int = 0
) -> None:
    restore_reference(frames, layout, slots, outputs, scales, centres, first_frame)


Restore = Callable[..., None]
both = pytest.mark.parametrize("run", [restore, reference], ids=["kernel", "reference"])


class Span:
    """The K of a quantised cell as frames, and what its restored buffers must be."""

    def __init__(self, name: Name, dtype: torch.dtype, shape: Shape, layout: TileLayout | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        self.layout = layout or shape.make_layout()
        self.quantiser: Quantiser = make_quantiser(name)
        self.place = CellPlace(
            range(FIRST_LAYER, FIRST_LAYER + shape.layers), range(shape.heads), range(7, 7 + shape.tokens)
        )
        values = make_values(shape, dtype, any_bits=name == "exact")
        self.set_parts(self.quantiser.quantise(CellValues(values, values[..., :1]), self.place))
        self.slots = scattered_slots(shape.tokens)

    def set_parts(self, quantised: Quantised) -> None:
        self.quantised = quantised
        parts = dict(zip(self.quantiser.parts(self.dtype), quantised, strict=True))
        self.frames = [self.layout.to_frames(x) for part, x in parts.items() if part.layout == "k"]
        self.arguments: dict[str, Any] = {}
        if isinstance(self.quantiser, SymmetricQuantiser):
            size = (self.shape.tokens, self.shape.layers, -1)
            self.arguments["scales"] = quantised[0].view(torch.bfloat16).view(size)
            self.arguments["centres"] = self.quantiser.centres("k", self.place.layers)

    def buffers(self) -> list[torch.Tensor]:
        return make_buffers(self.shape, self.dtype)

    def values(self) -> torch.Tensor:
        """``(tokens, layers, heads, dim)``."""
        return self.quantiser.dequantise(self.quantised, self.dtype, self.place).k

    def expected(self, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Poisoned buffers with some tokens, or all, in their slots."""
        tokens = torch.arange(self.shape.tokens, device=DEVICE) if tokens is None else tokens
        values, buffers = self.values(), self.buffers()
        for layer, buffer in enumerate(buffers):
            buffer.view(torch.uint8)[self.slots[tokens]] = values[tokens, layer].contiguous().view(torch.uint8)
        return buffers


def make_values(shape: Shape, dtype: torch.dtype, *, any_bits: bool) -> torch.Tensor:
    """``(tokens, layers, heads, dim)``: any bits at all, or numbers with the awkward ones among them."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.tokens, shape.layers, shape.heads, shape.dim)
    if any_bits:
        bits = torch.randint(0, 256, (*size[:-1], size[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
        return bits.view(dtype).to(DEVICE)
    magnitudes = 10.0 ** torch.randint(-3, 4, (*size[:3], 1), generator=generator)
    values = torch.randn(size, generator=generator) * magnitudes
    if shape.tokens > 8:
        values[1] = 0.0
        values[2] = -0.0
        values[3] *= torch.finfo(dtype).smallest_normal  # subnormal
        values[4] = values[4] / values[4].abs().max() * (0.9 * torch.finfo(dtype).max)
        values[5] = torch.randint(-127, 128, size[1:], generator=generator) / 2.0  # halfway between integers
        values[5, ..., 0] = 127.0
    return values.to(dtype).to(DEVICE)


def assert_buffers(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert_same_bits(x, y)


def run_span(run: Restore, span: Span) -> None:
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_same_bits_as_the_quantiser(name: Name, dtype: torch.dtype, run: Restore) -> None:
    run_span(run, Span(name, dtype, SMALL, WASTEFUL))


@both
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_a_frame_a_token(name: Name, run: Restore) -> None:
    flat = tile_layout(SMALL.heads, SMALL.dim, SMALL.tokens, FLAT)
    run_span(run, Span(name, torch.bfloat16, SMALL, flat))


@both
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_shapes(name: Name, shape: Shape, run: Restore) -> None:
    run_span(run, Span(name, torch.bfloat16, shape))


@both
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [*((*kind, LATENT) for kind in KINDS), ("exact", torch.uint8, LATENT), ("exact", torch.uint8, PACKED_LATENT)],
    ids=lambda x: shape_id(x) if isinstance(x, Shape) else str(x),
)
def test_one_latent_vector_a_token(name: Name, dtype: torch.dtype, shape: Shape, run: Restore) -> None:
    run_span(run, Span(name, dtype, shape))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_integer_and_any_scale(dtype: torch.dtype, run: Restore) -> None:
    """Roundings and overflows that no quantiser would make."""
    span = Span("uint8", dtype, Shape(63, 2, 2, 128))
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 256, (63, 2, 2, 128), generator=generator, dtype=torch.uint8)
    finite = torch.randint(0, 0x7F80, (63, 2, 2), generator=generator, dtype=torch.int16)
    span.set_parts((finite.to(DEVICE).view(torch.uint8).flatten(), integers.to(DEVICE), *span.quantised[2:]))
    run_span(run, span)


@both
@pytest.mark.parametrize("name", ["cachegen", "exact"])
def test_frame_by_frame(name: Name, run: Restore) -> None:
    span = Span(name, torch.bfloat16, Shape(200, 2, 3, 80), WASTEFUL)
    num_frames = span.frames[0].shape[0]
    assert num_frames == 4
    outputs = span.buffers()
    for first, end in ((1, 3), (0, 1), (3, num_frames)):
        # Frames of a ring: each is contiguous, and something else lies between them.
        ring = [poisoned(end - first, 2, *frames.shape[1:], dtype=torch.uint8)[:, 1] for frames in span.frames]
        for mine, frames in zip(ring, span.frames, strict=True):
            mine.copy_(frames[first:end])
        run(ring, span.layout, span.slots, outputs, first_frame=first, **span.arguments)
        if first == 1:
            frame_of = torch.arange(span.shape.tokens, device=DEVICE) % num_frames
            assert_buffers(outputs, span.expected(((frame_of >= 1) & (frame_of < 3)).nonzero().squeeze(1)))
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_skipped_tokens_stay_poisoned(name: Name, run: Restore) -> None:
    span = Span(name, torch.float16, SMALL, WASTEFUL)
    kept = torch.arange(SMALL.tokens, device=DEVICE) % 3 == 1
    outputs = span.buffers()
    run(span.frames, span.layout, torch.where(kept, span.slots, -1), outputs, **span.arguments)
    assert_buffers(outputs, span.expected(kept.nonzero().squeeze(1)))


@both
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_slots_and_heads_apart(name: Name, run: Restore) -> None:
    span = Span(name, torch.bfloat16, SMALL, WASTEFUL)
    whole = poisoned(SMALL.layers, NUM_SLOTS, 2, SMALL.heads, 3, SMALL.dim, dtype=span.dtype)
    outputs = [layer[:, 1, :, 2] for layer in whole]
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())
    between = torch.ones(whole.shape, dtype=torch.bool, device=DEVICE)
    between[:, :, 1, :, 2] = False
    assert bool((whole.view(torch.int16)[between] == poisoned(1, dtype=torch.bfloat16).view(torch.int16)).all())


@both
@pytest.mark.parametrize(("name", "dtype"), [("uint8", torch.bfloat16), ("exact", torch.float8_e4m3fn)], ids=str)
def test_slots_past_two_to_the_31(name: Name, dtype: torch.dtype, run: Restore) -> None:
    """Offsets that 32 bits do not hold. The memory is only reserved: what is not touched costs nothing."""
    span = Span(name, dtype, Shape(5, 1, 1, 256))
    num_slots = 2**31 // 256 + 64
    output = torch.empty((num_slots, 1, 256), dtype=dtype, device=DEVICE)
    slots = num_slots - 1 - torch.arange(5, device=DEVICE) * 2
    around = torch.arange(num_slots - 16, num_slots, device=DEVICE)
    marked = poisoned(16, 1, 256, dtype=dtype)
    output.view(torch.uint8)[around] = marked.view(torch.uint8)
    run(span.frames, span.layout, slots, [output], **span.arguments)
    marked.view(torch.uint8)[slots - int(around[0])] = span.values()[:, 0].contiguous().view(torch.uint8)
    assert_same_bits(output.view(torch.uint8)[around], marked.view(torch.uint8))


@both
def test_nothing_to_do(run: Restore) -> None:
    span = Span("uint8", torch.bfloat16, SMALL, WASTEFUL)
    outputs = span.buffers()
    run([span.frames[0][:0]], span.layout, span.slots, outputs, **span.arguments)
    run(span.frames, span.layout, torch.full_like(span.slots, -1), outputs, **span.arguments)
    assert_buffers(outputs, span.buffers())


class TestArguments:
    """What does not fit together is named, both sides."""

    def refused(self, match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        span = Span("uint8", torch.bfloat16, SMALL, WASTEFUL)
        arguments = {
            "frames": span.frames,
            "layout": span.layout,
            "slots": span.slots,
            "outputs": span.buffers(),
            **span.arguments,
            **changes,
        }
        with pytest.raises(error, match=match):
            restore(**arguments)

    def test_frames(self) -> None:
        self.refused(
            r"\(2, 3, 144, 144\) on .*, expected uint8 \(n, 3, 144, 152\)",
            frames=[poisoned(2, 3, 144, 144, dtype=torch.uint8)],
        )
        self.refused("2 byte planes of frames, expected 1", frames=[poisoned(2, 3, 144, 152, dtype=torch.uint8)] * 2)
        self.refused("must be contiguous", frames=[poisoned(2, 3, 144, 304, dtype=torch.uint8)[..., ::2]])

    def test_frame_range(self) -> None:
        self.refused(r"frames 1 to 3, but \(63,\) tokens fill 2", first_frame=1)

    def test_outputs(self) -> None:
        self.refused("no buffers, expected one a layer", outputs=[])
        self.refused(
            "4 layers, expected at most 3", FormatError, outputs=[poisoned(1024, 3, 80, dtype=torch.bfloat16)] * 4
        )
        self.refused(
            r"buffers differ: .*\(1024, 3, 80\).*\(1025, 3, 80\)",
            outputs=[poisoned(n, 3, 80, dtype=torch.bfloat16) for n in (1024, 1025)],
        )
        self.refused("expected the last to be 1", outputs=[poisoned(1024, 80, 3, dtype=torch.bfloat16).mT] * 2)
        self.refused(
            "cannot hold 3 heads of 96", FormatError, outputs=[poisoned(1024, 3, 96, dtype=torch.bfloat16)] * 2
        )

    def test_slots(self) -> None:
        self.refused("expected int64", slots=torch.zeros(63, dtype=torch.int32, device=DEVICE))
        if DEVICE.type == "cpu":
            self.refused(r"slot 1024 is outside a buffer of shape \(1024, 3, 80\)", slots=torch.arange(962, 1025))

    def test_scales(self) -> None:
        scales = torch.ones((62, 2, 3), dtype=torch.bfloat16, device=DEVICE)
        self.refused(r"scales have shape \(62, 2, 3\), expected \(63, 2, 3 or 1\)", scales=scales)
        self.refused("expected contiguous bfloat16", scales=torch.ones((63, 2, 3), device=DEVICE))
        self.refused("centres are None, expected 2", centres=None)
        self.refused("centres without scales", scales=None, frames=[poisoned(2, 3, 144, 152, dtype=torch.uint8)] * 2)
        self.refused(
            "only the exact quantiser", UnsupportedError, outputs=[poisoned(1024, 3, 80, dtype=torch.float8_e5m2)] * 2
        )
