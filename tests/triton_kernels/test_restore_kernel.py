from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvfetch.errors import FormatError, UnsupportedError
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant import Quantised, Quantiser, make_quantiser
from sgl_kvfetch.quant.registry import QuantiserName
from sgl_kvfetch.triton_kernels.restore import restore, restore_reference
from tests.triton_kernels.cases import (
    DEVICE,
    FIRST_LAYER,
    KINDS,
    LATENT,
    ODD_SHAPES,
    PACKED_LATENT,
    SMALL,
    Shape,
    assert_same_bits,
    blocks_of_tokens,
    centres_of,
    make_values,
    poisoned,
    scattered_slots,
    shape_id,
    wasteful,
)

NUM_SLOTS = 1024


def reference(
    frames: Any, layout: Any, slots: Any, outputs: Any, *, scales: Any = None, centres: Any = None, first_frame: int = 0
) -> None:
    restore_reference(frames, layout, slots, outputs, scales, centres, first_frame)


Restore = Callable[..., None]
both = pytest.mark.parametrize("run", [restore, reference], ids=["kernel", "reference"])


class Span:
    """A quantised span as frames, and what its restored buffers must be."""

    def __init__(
        self, name: QuantiserName, dtype: torch.dtype, shape: Shape, layout: FrameLayout | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.layout = layout or shape.make_layout()
        self.quantiser: Quantiser = make_quantiser(name)
        self.quantised: Quantised = self.quantiser.quantise(make_values(shape, dtype, self.quantiser), "k", FIRST_LAYER)
        self.frames = [self.layout.to_frames(x) for x in self.quantised.integers]
        self.slots = scattered_slots(shape.tokens, NUM_SLOTS)
        self.arguments = {"scales": self.quantised.scales, **centres_of(self.quantiser, shape.layers)}

    def buffers(self) -> list[torch.Tensor]:
        shape = (NUM_SLOTS, self.shape.heads, self.shape.dim)
        return [poisoned(*shape, dtype=self.dtype) for _ in range(self.shape.layers)]

    def expected(self, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Poisoned buffers with some tokens, or all, in their slots."""
        tokens = torch.arange(self.shape.tokens, device=DEVICE) if tokens is None else tokens
        values = self.quantiser.dequantise(self.quantised, self.dtype, "k", FIRST_LAYER)
        buffers = self.buffers()
        for layer, buffer in enumerate(buffers):
            for token in tokens.tolist():
                buffer[self.slots[token]] = values[token, layer]
        return buffers


def assert_buffers(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert_same_bits(x, y)


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_same_bits_as_the_quantiser(name: QuantiserName, dtype: torch.dtype, inter_frame: str, run: Restore) -> None:
    span = Span(name, dtype, SMALL, wasteful(inter_frame))
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_blocks_of_tokens(name: QuantiserName, inter_frame: str, run: Restore) -> None:
    span = Span(name, torch.bfloat16, SMALL, blocks_of_tokens(inter_frame))
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_shapes(name: QuantiserName, shape: Shape, run: Restore) -> None:
    span = Span(name, torch.bfloat16, shape)
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [*((*kind, LATENT) for kind in KINDS), ("exact", torch.uint8, LATENT), ("exact", torch.uint8, PACKED_LATENT)],
    ids=lambda x: shape_id(x) if isinstance(x, Shape) else str(x),
)
def test_one_latent_vector_a_token(name: QuantiserName, dtype: torch.dtype, shape: Shape, run: Restore) -> None:
    span = Span(name, dtype, shape)
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_integer_and_any_scale(dtype: torch.dtype, run: Restore) -> None:
    """Roundings and overflows that no quantiser would make."""
    shape = Shape(63, 2, 2, 128)
    span = Span("uint8", dtype, shape)
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 256, (1, 63, 2, 2, 128), generator=generator, dtype=torch.uint8)
    finite = torch.randint(0, 0x7F80, (63, 2, 2), generator=generator, dtype=torch.int16)
    scales = finite.view(torch.bfloat16).to(DEVICE)
    span.quantised = Quantised(integers.to(DEVICE), scales)
    span.frames = [span.layout.to_frames(integers[0].to(DEVICE))]
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **{**span.arguments, "scales": scales})
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
@pytest.mark.parametrize("make_layout", [wasteful, blocks_of_tokens])
@pytest.mark.parametrize("name", ["cachegen", "exact"])
def test_frame_by_frame(
    name: QuantiserName, make_layout: Callable[[str], FrameLayout], inter_frame: str, run: Restore
) -> None:
    shape = Shape(200, 2, 3, 80)
    span = Span(name, torch.bfloat16, shape, make_layout(inter_frame))
    num_frames, tiles = span.frames[0].shape[0], span.layout.tokens_per_frame
    tokens = torch.arange(shape.tokens, device=DEVICE)
    frame_of = tokens % num_frames if inter_frame == "sliced" else tokens // tiles
    outputs = span.buffers()
    for first, end in ((1, 3), (0, 1), (3, num_frames)):
        # Frames of a ring: each is contiguous, and something else lies between them.
        ring = [poisoned(end - first, 2, *frames.shape[1:], dtype=torch.uint8)[:, 1] for frames in span.frames]
        for mine, frames in zip(ring, span.frames, strict=True):
            mine.copy_(frames[first:end])
        run(ring, span.layout, span.slots, outputs, first_frame=first, **span.arguments)
        if first == 1:
            assert_buffers(outputs, span.expected(tokens[(frame_of >= 1) & (frame_of < 3)]))
    assert_buffers(outputs, span.expected())


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_skipped_tokens_stay_poisoned(name: QuantiserName, run: Restore) -> None:
    span = Span(name, torch.float16, SMALL, wasteful())
    kept = torch.arange(SMALL.tokens, device=DEVICE) % 3 == 1
    outputs = span.buffers()
    run(span.frames, span.layout, torch.where(kept, span.slots, -1), outputs, **span.arguments)
    assert_buffers(outputs, span.expected(kept.nonzero().squeeze(1)))


@both
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_slots_and_heads_apart(name: QuantiserName, run: Restore) -> None:
    span = Span(name, torch.bfloat16, SMALL, wasteful())
    whole = poisoned(SMALL.layers, NUM_SLOTS, 2, SMALL.heads, 3, SMALL.dim, dtype=span.dtype)
    outputs = [layer[:, 1, :, 2] for layer in whole]
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    assert_buffers(outputs, span.expected())
    between = torch.ones(whole.shape, dtype=torch.bool, device=DEVICE)
    between[:, :, 1, :, 2] = False
    assert bool((whole.view(torch.int16)[between] == poisoned(1, dtype=torch.bfloat16).view(torch.int16)).all())


@both
@pytest.mark.parametrize(("name", "dtype"), [("uint8", torch.bfloat16), ("exact", torch.float8_e4m3fn)], ids=str)
def test_slots_past_two_to_the_31(name: QuantiserName, dtype: torch.dtype, run: Restore) -> None:
    """Offsets that 32 bits do not hold. The memory is only reserved: what is not touched costs nothing."""
    span = Span(name, dtype, Shape(5, 1, 1, 256))
    num_slots = 2**31 // 256 + 64
    output = torch.empty((num_slots, 1, 256), dtype=dtype, device=DEVICE)
    slots = num_slots - 1 - torch.arange(5, device=DEVICE) * 2
    around = torch.arange(num_slots - 16, num_slots, device=DEVICE)
    marked = poisoned(16, 1, 256, dtype=dtype)
    output.view(torch.uint8)[around] = marked.view(torch.uint8)
    run(span.frames, span.layout, slots, [output], **span.arguments)
    values = span.quantiser.dequantise(span.quantised, dtype, "k", FIRST_LAYER)[:, 0]
    marked.view(torch.uint8)[slots - int(around[0])] = values.view(torch.uint8)
    assert_same_bits(output.view(torch.uint8)[around], marked.view(torch.uint8))


@both
def test_nothing_to_do(run: Restore) -> None:
    span = Span("uint8", torch.bfloat16, SMALL, wasteful())
    outputs = span.buffers()
    run([span.frames[0][:0]], span.layout, span.slots, outputs, **span.arguments)
    run(span.frames, span.layout, torch.full_like(span.slots, -1), outputs, **span.arguments)
    assert_buffers(outputs, span.buffers())


class TestArguments:
    """What does not fit together is named, both sides."""

    def refused(self, match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        span = Span("uint8", torch.bfloat16, SMALL, wasteful())
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
            r"\(2, 3, 144, 144\), expected uint8 \(n, 3, 144, 152\)",
            frames=[poisoned(2, 3, 144, 144, dtype=torch.uint8)],
        )
        self.refused("2 byte planes of frames, expected 1", frames=[poisoned(2, 3, 144, 152, dtype=torch.uint8)] * 2)
        self.refused("must be contiguous", frames=[poisoned(2, 3, 144, 304, dtype=torch.uint8)[..., ::2]])

    def test_frame_range(self) -> None:
        self.refused(r"frames 1 to 3, but \(63,\) tokens fill 2", first_frame=1)

    def test_outputs(self) -> None:
        self.refused("4 buffers, expected one a layer, 1 to 3", outputs=[poisoned(8, 3, 80, dtype=torch.bfloat16)] * 4)
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
        self.refused(
            "only the exact quantiser", UnsupportedError, outputs=[poisoned(1024, 3, 80, dtype=torch.float8_e5m2)] * 2
        )
