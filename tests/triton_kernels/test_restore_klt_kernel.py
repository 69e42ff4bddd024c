from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sgl_kvfetch.errors import FormatError, UnsupportedError
from sgl_kvfetch.layout.choose import channel_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.rope import Rope, rotate
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt, restore_klt_reference
from sgl_kvfetch.types import TENSORS, TensorName
from tests.quant.profiles import make_profile, values_of
from tests.triton_kernels.cases import (
    DEVICE,
    FLOATS,
    SMALL,
    Shape,
    assert_same_bits,
    blocks_of_tokens,
    poisoned,
    scattered_slots,
    shape_id,
    wasteful,
)

NUM_SLOTS = 1024
STEP = 0.37
FIRST_TOKEN = 1234


def reference(
    frames: Any, layout: Any, slots: Any, outputs: Any, *, rotation: Any = None, interleaved: Any = False, **rest: Any
) -> None:
    restore_klt_reference(
        frames,
        layout,
        slots,
        outputs,
        rest["scales"],
        rest["inverse"],
        rest["step"],
        rest["means"],
        rotation,
        interleaved,
        rest.get("first_frame", 0),
    )


Restore = Callable[..., None]
both = pytest.mark.parametrize("run", [restore_klt, reference], ids=["kernel", "reference"])


@dataclass(frozen=True)
class Case:
    shape: Shape
    block_heads: int = 1
    rotary_dim: int = 0
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16
    largest_mean: float = 4.0
    layout: FrameLayout | None = field(default=None)

    def make_layout(self) -> FrameLayout:
        shape = self.shape
        return self.layout or shape.layout or channel_layout(shape.heads, shape.dim, shape.tokens)


class Span:
    """Coefficients as frames, what they are restored with, and what they must become."""

    def __init__(self, case: Case) -> None:
        self.case, self.shape, self.layout = case, case.shape, case.make_layout()
        tokens, layers, heads, dim = case.shape.tokens, case.shape.layers, case.shape.heads, case.shape.dim
        size = case.block_heads * dim
        generator = torch.Generator().manual_seed(tokens + dim)
        self.integers = torch.randint(0, 256, (tokens, layers, heads, dim), generator=generator, dtype=torch.uint8)
        scales = 2.0 ** torch.randint(0, 4, (tokens, layers, 1), generator=generator)
        inverse = torch.randn((layers, heads // case.block_heads, size, size), generator=generator) / size**0.5
        means = torch.randn((layers, heads, dim), generator=generator) * case.largest_mean
        self.rope = (
            Rope(
                inv_freq=tuple((10000.0 ** -(torch.arange(case.rotary_dim // 2) * 2 / case.rotary_dim)).tolist()),
                attention_scaling=1.25,
                interleaved=case.interleaved,
            )
            if case.rotary_dim
            else None
        )
        self.frames = self.layout.to_frames(self.integers).to(DEVICE)
        self.slots = scattered_slots(tokens, NUM_SLOTS)
        self.arguments: dict[str, Any] = {
            "scales": scales.to(torch.bfloat16).to(DEVICE),
            "inverse": inverse.to(torch.bfloat16).to(DEVICE),
            "step": STEP,
            "means": means.to(DEVICE),
            "rotation": None if self.rope is None else self.rope.table(FIRST_TOKEN, tokens, DEVICE),
            "interleaved": case.interleaved,
        }

    def buffers(self) -> list[torch.Tensor]:
        shape = (NUM_SLOTS, self.shape.heads, self.shape.dim)
        return [poisoned(*shape, dtype=self.case.dtype) for _ in range(self.shape.layers)]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(tokens, layers, heads, dim)`` in float64, and how far float32 may be from it, in whatever order it adds.

        A sum of C exact products is off by at most ``C * 2**-24`` of the sum of their magnitudes; a few roundings more
        follow, all of them of numbers no larger.
        """
        size = self.case.block_heads * self.shape.dim
        n = (self.integers.double() - 128).view(*self.integers.shape[:2], -1, size)
        inverse, means = (self.arguments[name].double().cpu() for name in ("inverse", "means"))
        step = self.arguments["scales"].double().cpu().unsqueeze(-1) * torch.tensor(STEP).double()

        def through(n: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
            return torch.einsum("tlbc,lbcd->tlbd", n, inverse).reshape(self.integers.shape) * step

        values = through(n, inverse) + means
        off = (through(n.abs(), inverse.abs()) + means.abs()) * (size + 8) * 2.0**-24
        if self.rope is not None:
            table = self.arguments["rotation"].double().cpu()
            values = rotate(values, table, self.rope)
            half = self.case.rotary_dim // 2
            off = rotate(off, torch.cat((table[:, :half].abs(), -table[:, half:].abs()), 1), self.rope).maximum(
                rotate(off, table.abs(), self.rope)
            )
        return values, off

    def check(self, outputs: list[torch.Tensor], tokens: torch.Tensor | None = None) -> None:
        """Some tokens, or all, in their slots, rounded once; nothing else written."""
        tokens = torch.arange(self.shape.tokens) if tokens is None else tokens.cpu()
        slots = self.slots.cpu()[tokens]
        values, off = (x[tokens] for x in self.exact())
        info = torch.finfo(self.case.dtype)
        values = values.clamp(-info.max, info.max)
        exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal)).exponent - 1
        tolerance = off + info.eps / 2 * torch.exp2(exponent.double())
        rest = torch.ones(NUM_SLOTS, dtype=torch.bool)
        rest[slots] = False
        for layer, (output, untouched) in enumerate(zip(outputs, self.buffers(), strict=True)):
            error = (output.cpu()[slots].double() - values[:, layer]).abs()
            worst = (error - tolerance[:, layer]).argmax()
            assert bool((error <= tolerance[:, layer]).all()), (
                f"layer {layer}: off by {error.flatten()[worst]}, at most {tolerance[:, layer].flatten()[worst]} of "
                f"{values[:, layer].flatten()[worst]}"
            )
            assert_same_bits(output.cpu()[rest], untouched.cpu()[rest])


def run_case(run: Restore, case: Case) -> None:
    span = Span(case)
    outputs = span.buffers()
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    span.check(outputs)


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rotation",
    [{}, {"rotary_dim": 80}, {"rotary_dim": 80, "interleaved": True}],
    ids=["none", "neox", "gptj"],
)
def test_right_up_to_the_order_of_sums(rotation: dict[str, Any], dtype: torch.dtype, run: Restore) -> None:
    run_case(run, Case(SMALL, dtype=dtype, layout=wasteful(), **rotation))


@both
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor", TENSORS)
def test_same_as_the_quantiser(tensor: TensorName, interleaved: bool, run: Restore) -> None:
    """But for a last bit here and there: both add in an order of their own."""
    rope = Rope(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.25, interleaved=interleaved)
    profile = make_profile(num_layers=4, num_heads=6, head_dim=16, block_heads=2, rope=rope)
    quantiser = KltQuantiser(profile, step=0.01)
    values = values_of(profile, tensor, 50)[:, 1:4]
    quantised = quantiser.quantise(values, tensor, 1, FIRST_TOKEN)
    assert quantised.scales is not None
    layout = quantiser.layout(tensor, 6, 16, 50, "240p")
    slots = scattered_slots(50, NUM_SLOTS)
    outputs = [poisoned(NUM_SLOTS, 6, 16, dtype=torch.bfloat16) for _ in range(3)]
    run(
        layout.to_frames(quantised.integers[0]).to(DEVICE),
        layout,
        slots,
        outputs,
        scales=quantised.scales.to(DEVICE),
        inverse=quantiser.inverse[tensor][1:4].to(DEVICE),
        step=quantiser.step,
        means=quantiser.mean[tensor][1:4].to(DEVICE),
        rotation=rope.table(FIRST_TOKEN, 50, DEVICE) if tensor == "k" else None,
        interleaved=interleaved,
    )
    expected = quantiser.dequantise(quantised, torch.bfloat16, tensor, 1, FIRST_TOKEN)
    found = torch.stack([output[slots].cpu() for output in outputs], dim=1)
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-5)
    assert (found != expected).float().mean() < 0.01


@both
@pytest.mark.parametrize(
    "case",
    [
        Case(Shape(1, 1, 1, 48), rotary_dim=48),
        Case(Shape(63, 3, 8, 128), block_heads=2, rotary_dim=128),
        Case(Shape(500, 1, 2, 64), block_heads=2, rotary_dim=64, interleaved=True),
        Case(Shape(100, 1, 3, 96), block_heads=3, rotary_dim=96),
        Case(Shape(100, 2, 4, 80), block_heads=2, rotary_dim=80),
        Case(Shape(33, 1, 1, 256), rotary_dim=256),
        Case(Shape(7, 1, 6, 52), block_heads=2),
        Case(Shape(40, 1, 2, 67), block_heads=2),
        Case(Shape(17, 1, 1, 8), rotary_dim=8),
    ],
    ids=lambda case: shape_id(case.shape),
)
def test_shapes(case: Case, run: Restore) -> None:
    run_case(run, case)


@both
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 16, 52, 78])
def test_partial_rotation(rotary_dim: int, interleaved: bool, run: Restore) -> None:
    run_case(run, Case(Shape(20, 2, 3, 80), rotary_dim=rotary_dim, interleaved=interleaved))


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
def test_blocks_of_tokens(inter_frame: str, run: Restore) -> None:
    run_case(run, Case(SMALL, block_heads=3, rotary_dim=80, layout=blocks_of_tokens(inter_frame)))


@both
def test_values_past_the_largest_are_bounded(run: Restore) -> None:
    case = Case(SMALL, dtype=torch.float16, largest_mean=1e5, layout=wasteful())
    assert bool((Span(case).exact()[0].abs() > torch.finfo(torch.float16).max).any())
    run_case(run, case)


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
def test_frame_by_frame(inter_frame: str, run: Restore) -> None:
    layout = blocks_of_tokens(inter_frame)
    span = Span(Case(Shape(200, 2, 3, 80), rotary_dim=80, layout=layout))
    num_frames = span.frames.shape[0]
    assert num_frames > 4
    tokens = torch.arange(span.shape.tokens)
    frame_of = tokens % num_frames if inter_frame == "sliced" else tokens // layout.tokens_per_frame
    outputs = span.buffers()
    for first, end in ((1, 3), (0, 1), (3, num_frames)):
        # Frames of a ring: each is contiguous, and something else lies between them.
        ring = poisoned(end - first, 2, *span.frames.shape[1:], dtype=torch.uint8)[:, 1]
        ring.copy_(span.frames[first:end])
        run(ring, layout, span.slots, outputs, first_frame=first, **span.arguments)
        if first == 1:
            span.check(outputs, tokens[(frame_of >= 1) & (frame_of < 3)])
    span.check(outputs)


@both
def test_skipped_tokens_stay_poisoned(run: Restore) -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=wasteful()))
    kept = torch.arange(SMALL.tokens, device=DEVICE) % 3 == 1
    outputs = span.buffers()
    run(span.frames, span.layout, torch.where(kept, span.slots, -1), outputs, **span.arguments)
    span.check(outputs, kept.nonzero().squeeze(1))


@both
def test_slots_and_heads_apart(run: Restore) -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=wasteful()))
    whole = poisoned(SMALL.layers, NUM_SLOTS, 2, SMALL.heads, 3, SMALL.dim, dtype=torch.bfloat16)
    outputs = [layer[:, 1, :, 2] for layer in whole]
    run(span.frames, span.layout, span.slots, outputs, **span.arguments)
    span.check(outputs)
    between = torch.ones(whole.shape, dtype=torch.bool, device=DEVICE)
    between[:, :, 1, :, 2] = False
    assert bool((whole.view(torch.int16)[between] == poisoned(1, dtype=torch.bfloat16).view(torch.int16)).all())


@both
def test_slots_past_two_to_the_31(run: Restore) -> None:
    """Offsets that 32 bits do not hold. The memory is only reserved: what is not touched costs nothing."""
    span = Span(Case(Shape(5, 1, 1, 256), rotary_dim=256))
    near = span.buffers()
    run(span.frames, span.layout, span.slots, near, **span.arguments)
    num_slots = 2**31 // 256 + 64
    output = torch.empty((num_slots, 1, 256), dtype=torch.bfloat16, device=DEVICE)
    slots = num_slots - 1 - torch.arange(5, device=DEVICE) * 2
    run(span.frames, span.layout, slots, [output], **span.arguments)
    assert_same_bits(output[slots], near[0][span.slots])


@both
def test_nothing_to_do(run: Restore) -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=wasteful()))
    outputs = span.buffers()
    run(span.frames[:0], span.layout, span.slots, outputs, **span.arguments)
    run(span.frames, span.layout, torch.full_like(span.slots, -1), outputs, **span.arguments)
    for found, expected in zip(outputs, span.buffers(), strict=True):
        assert_same_bits(found, expected)


def test_a_rotation_of_nothing_changes_nothing() -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=wasteful()))
    still = span.buffers()
    arguments = {**span.arguments, "rotation": torch.zeros((SMALL.tokens, 80), device=DEVICE)}
    arguments["rotation"][:, :40] = 1.0
    restore_klt(span.frames, span.layout, span.slots, still, **arguments)
    unrotated = Span(replace(span.case, rotary_dim=0))
    unrotated.check(still)


class TestArguments:
    """What does not fit together is named, both sides."""

    def refused(self, match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        span = Span(Case(SMALL, rotary_dim=80, layout=wasteful()))
        arguments = {
            "frames": span.frames,
            "layout": span.layout,
            "slots": span.slots,
            "outputs": span.buffers(),
            **span.arguments,
            **changes,
        }
        with pytest.raises(error, match=match):
            restore_klt(**arguments)

    def test_frames(self) -> None:
        self.refused(
            r"\(2, 3, 144, 144\), expected uint8 \(n, 3, 144, 152\)", frames=poisoned(2, 3, 144, 144, dtype=torch.uint8)
        )
        self.refused(r"frames 1 to 3, but \(63,\) tokens fill 2", first_frame=1)

    def test_outputs(self) -> None:
        self.refused("4 buffers, expected one a layer, 1 to 3", outputs=[poisoned(8, 3, 80, dtype=torch.bfloat16)] * 4)
        self.refused(
            "cannot hold 3 heads of 96", FormatError, outputs=[poisoned(1024, 3, 96, dtype=torch.bfloat16)] * 2
        )
        self.refused(
            "only the exact quantiser", UnsupportedError, outputs=[poisoned(1024, 3, 80, dtype=torch.float8_e5m2)] * 2
        )

    def test_scales(self) -> None:
        scales = torch.ones((63, 2, 3), dtype=torch.bfloat16, device=DEVICE)
        self.refused(r"scales have shape \(63, 2, 3\), expected \(63, 2, 1\)", scales=scales)
        self.refused("expected contiguous torch.bfloat16", scales=torch.ones((63, 2, 1), device=DEVICE))

    def test_inverse(self) -> None:
        for shape in ((1, 3, 80, 80), (2, 3, 80, 40), (2, 2, 80, 80), (2, 6, 40, 40), (2, 2, 120, 120)):
            inverse = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
            self.refused(r"inverse has shape .* expected \(layers, blocks, C, C\)", inverse=inverse)
        inverse = torch.zeros((2, 3, 80, 80), dtype=torch.bfloat16, device=DEVICE)
        self.refused("inverse of torch.float32", inverse=inverse.float())
        self.refused("inverse of .* expected contiguous", inverse=inverse.mT)

    def test_means(self) -> None:
        self.refused(r"means have shape \(2, 240\), expected", means=torch.zeros((2, 240), device=DEVICE))
        self.refused("means of torch.float64", means=torch.zeros((2, 3, 80), dtype=torch.float64, device=DEVICE))

    def test_rotation(self) -> None:
        for shape in ((62, 80), (63, 81), (63, 82), (63, 0), (63,)):
            self.refused("rotation has shape", rotation=torch.zeros(shape, device=DEVICE))
        self.refused("expected contiguous", rotation=torch.zeros((80, 63), device=DEVICE).T)
        odd = Span(Case(Shape(20, 1, 1, 67)))
        with pytest.raises(ValueError, match="rotation of heads of 67 values"):
            restore_klt(
                odd.frames,
                odd.layout,
                odd.slots,
                odd.buffers(),
                **{**odd.arguments, "rotation": torch.zeros((20, 66), device=DEVICE)},
            )
