"""``restore_klt`` and its reference against sums in float64, and against the quantiser ``klt``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.layout.regions import RegionLayout, region_layout
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser, scales_of
from sgl_kvfetch.codec.quant.rope import Rope, rotate
from sgl_kvfetch.errors import FormatError, UnsupportedError
from sgl_kvfetch.triton_kernels.restore_klt import region_pixels, restore_klt, restore_klt_reference
from tests.codec.quant.profiles import make_profile, place_of, values_of
from tests.triton_kernels.cases import (
    DEVICE,
    FLOATS,
    NUM_SLOTS,
    SMALL,
    Shape,
    assert_nearly_same,
    assert_same_bits,
    make_buffers,
    poisoned,
    scattered_slots,
    shape_id,
)

FIRST_TOKEN = 1234
# Room left everywhere: in a region for tokens, in the picture on both sides, and few regions a frame.
WASTEFUL = RegionLayout(width=152, height=144, token_rows=30, token_cols=40)


def reference(
    frames: Any, layout: Any, slots: Any, outputs: Any, *, rotation: Any = None, interleaved: Any = False, **rest: Any
) -> None:
    restore_klt_reference(
        frames, layout, slots, outputs, rest["scales"], rest["matrix"], rest["mean"], rest["pixels"], rotation,
        interleaved,
    )  # fmt: skip


Restore = Callable[..., None]
both = pytest.mark.parametrize("run", [restore_klt, reference], ids=["kernel", "reference"])


@dataclass(frozen=True)
class Case:
    shape: Shape
    coefficients: int = 100  # of WASTEFUL: three frames
    rotary_dim: int = 0
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16
    largest_mean: float = 4.0
    layout: RegionLayout | None = None

    def make_layout(self) -> RegionLayout:
        return self.layout or region_layout(self.coefficients, self.shape.tokens)


class Span:
    """Coefficients as frames, what they are restored with, and what they must become."""

    def __init__(self, case: Case) -> None:
        self.case, self.shape, self.layout = case, case.shape, case.make_layout()
        tokens, count = case.shape.tokens, case.coefficients
        channels = case.shape.layers * case.shape.heads * case.shape.dim
        generator = torch.Generator().manual_seed(tokens + case.shape.dim)
        self.integers = torch.randint(0, 256, (count, tokens), generator=generator, dtype=torch.uint8)
        # K's columns of a cell's matrix, or V's: others lie beside them.
        matrix = torch.randn((count, 2 * channels), generator=generator) / count**0.5
        mean = torch.randn(channels, generator=generator) * case.largest_mean
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
        self.slots = scattered_slots(tokens)
        self.arguments: dict[str, Any] = {
            "scales": (torch.rand(tokens, generator=generator) + 0.1).to(DEVICE),
            "matrix": matrix.to(torch.bfloat16).to(DEVICE)[:, channels:],
            "mean": mean.to(DEVICE),
            "pixels": region_pixels(self.layout, count).to(DEVICE),
            "rotation": None if self.rope is None else self.rope.table(FIRST_TOKEN, tokens, DEVICE),
            "interleaved": case.interleaved,
        }

    def buffers(self) -> list[torch.Tensor]:
        return make_buffers(self.shape, self.case.dtype)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(tokens, layers, heads, dim)`` in float64, and how far float32 may be from it, in whatever order it adds.

        A sum of C exact products is off by at most ``C * 2**-24`` of the sum of their magnitudes; a few roundings more
        follow, all of them of numbers no larger.
        """
        n = self.integers.double().T - 128
        scales, matrix, mean = (self.arguments[name].double().cpu() for name in ("scales", "matrix", "mean"))
        size = (self.shape.tokens, self.shape.layers, self.shape.heads, self.shape.dim)
        values = ((n @ matrix) * scales[:, None] + mean).view(size)
        magnitudes = ((n.abs() @ matrix.abs()) * scales[:, None] + mean.abs()).view(size)
        off = magnitudes * (self.case.coefficients + 8) * 2.0**-24
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
    run_case(run, Case(SMALL, dtype=dtype, layout=WASTEFUL, **rotation))


@both
@pytest.mark.parametrize("rope", [None, Rope(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.25)], ids=["plain", "rope"])
def test_same_as_the_quantiser(rope: Rope | None, run: Restore, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a last bit here and there: both add in an order of their own. The last cells have one layer."""
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)  # a CPU that multiplies in bfloat16 rounds more
    profile = make_profile(num_layers=4, head_dim=16, v_head_dim=24, cell_heads=2, rope=rope)
    quantiser = KltQuantiser(profile, step=0.03)
    assert quantiser.coefficient_shares[1] > 0.3  # so many need two integers
    values = CellValues(*(x.to(torch.bfloat16) for x in values_of(profile, 50, FIRST_TOKEN)))
    places = [place_of(profile, key, 50, FIRST_TOKEN) for key in profile.cells]
    layout = region_layout(max(quantiser.num_coefficients(p) or 0 for p in places), 50)
    slots = scattered_slots(50)
    for place in places:
        exponents, _, integers = quantised = quantiser.quantise(values.cell(place.layers, place.heads), place)
        assert not (exponents == EXACT).any()
        inverse = quantiser.inverse_of(place).to(DEVICE)
        expected = quantiser.dequantise(quantised, torch.bfloat16, place)
        num_k = expected.k[0].numel()
        for wanted, channels in zip(expected, (slice(num_k), slice(num_k, None)), strict=True):
            is_k = channels.stop is not None
            outputs = make_buffers(Shape(50, *wanted.shape[1:]), torch.bfloat16)
            run(
                layout.to_frames(integers).to(DEVICE),
                layout,
                slots,
                outputs,
                scales=(scales_of(exponents) * quantiser.step).to(DEVICE),
                matrix=inverse.matrix[:, channels],
                mean=inverse.mean[channels],
                pixels=region_pixels(layout, len(inverse.matrix)).to(DEVICE),
                rotation=rope.table(FIRST_TOKEN, 50, DEVICE) if rope is not None and is_k else None,
            )
            assert_nearly_same(torch.stack([x[slots].cpu() for x in outputs], dim=1), wanted)


@both
@pytest.mark.parametrize(
    "case",
    [
        Case(Shape(1, 1, 1, 48), coefficients=1, rotary_dim=48),
        Case(Shape(63, 3, 2, 128), coefficients=701, rotary_dim=128),
        Case(Shape(500, 1, 2, 64), coefficients=40, rotary_dim=64, interleaved=True),
        Case(Shape(100, 5, 1, 96), coefficients=33, rotary_dim=96),  # more layers than there are colour planes
        Case(Shape(1000, 2, 1, 80), coefficients=64, rotary_dim=80),
        Case(Shape(33, 1, 1, 256), coefficients=200, rotary_dim=256),
        Case(Shape(7, 1, 6, 52), coefficients=90),
        Case(Shape(40, 1, 2, 67), coefficients=130),
        Case(Shape(17, 1, 1, 8), coefficients=15, rotary_dim=8),
    ],
    ids=lambda case: f"{shape_id(case.shape)} {case.coefficients}",
)
def test_shapes(case: Case, run: Restore) -> None:
    run_case(run, case)


@both
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 16, 52, 78])
def test_partial_rotation(rotary_dim: int, interleaved: bool, run: Restore) -> None:
    run_case(run, Case(Shape(20, 2, 3, 80), rotary_dim=rotary_dim, interleaved=interleaved))


@both
def test_values_past_the_largest_are_bounded(run: Restore) -> None:
    case = Case(SMALL, dtype=torch.float16, largest_mean=1e5, layout=WASTEFUL)
    assert bool((Span(case).exact()[0].abs() > torch.finfo(torch.float16).max).any())
    run_case(run, case)


@pytest.mark.parametrize("layout", [WASTEFUL, region_layout(100, 63), region_layout(100, 63, "flat")])
def test_regions_begin_at_these_pixels(layout: RegionLayout) -> None:
    integers = torch.randint(0, 256, (100, 63), dtype=torch.uint8)
    pixels = layout.to_frames(integers).flatten()
    assert torch.equal(pixels[region_pixels(layout, 100)], integers[:, 0])


@both
def test_skipped_tokens_stay_poisoned(run: Restore) -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=WASTEFUL))
    kept = torch.arange(SMALL.tokens, device=DEVICE) % 3 == 1
    outputs = span.buffers()
    run(span.frames, span.layout, torch.where(kept, span.slots, -1), outputs, **span.arguments)
    span.check(outputs, kept.nonzero().squeeze(1))


@both
def test_slots_and_heads_apart(run: Restore) -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=WASTEFUL))
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
    span = Span(Case(SMALL, rotary_dim=80, layout=WASTEFUL))
    outputs = span.buffers()
    run(span.frames, span.layout, torch.full_like(span.slots, -1), outputs, **span.arguments)
    for found, expected in zip(outputs, span.buffers(), strict=True):
        assert_same_bits(found, expected)


def test_a_rotation_of_nothing_changes_nothing() -> None:
    span = Span(Case(SMALL, rotary_dim=80, layout=WASTEFUL))
    still = span.buffers()
    arguments = {**span.arguments, "rotation": torch.zeros((SMALL.tokens, 80), device=DEVICE)}
    arguments["rotation"][:, :40] = 1.0
    restore_klt(span.frames, span.layout, span.slots, still, **arguments)
    unrotated = Span(replace(span.case, rotary_dim=0))
    unrotated.check(still)


class TestArguments:
    """What does not fit together is named, both sides."""

    def refused(self, match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        span = Span(Case(SMALL, rotary_dim=80, layout=WASTEFUL))
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
        for shape in ((3, 3, 144, 144), (2, 3, 144, 152), (4, 3, 144, 152)):
            frames = poisoned(*shape, dtype=torch.uint8)
            self.refused(r"frames are .*, expected uint8 \(3, 3, 144, 152\)", frames=frames)
        frames = poisoned(3, 3, 144, 304, dtype=torch.uint8)[..., ::2]
        self.refused("each of 3x144x152 must be contiguous", frames=frames)
        self.refused("expected contiguous", frames=poisoned(3, 2, 3, 144, 152, dtype=torch.uint8)[:, 1])

    def test_slots(self) -> None:
        slots = scattered_slots(1000).repeat(2)[:1201]
        self.refused("region of 30x40 cannot hold 1201 tokens", FormatError, slots=slots)

    def test_outputs(self) -> None:
        three = [poisoned(1024, 3, 80, dtype=torch.bfloat16)] * 3
        self.refused(r"matrix: .*, expected torch.bfloat16 \(100, 720\)", outputs=three)
        self.refused(
            "only the exact quantiser", UnsupportedError, outputs=[poisoned(1024, 3, 80, dtype=torch.float8_e5m2)] * 2
        )

    def test_scales(self) -> None:
        self.refused(r"scales: .*, expected torch.float32 \(63,\)", scales=torch.ones((63, 1), device=DEVICE))
        self.refused("scales: torch.bfloat16", scales=torch.ones(63, dtype=torch.bfloat16, device=DEVICE))

    def test_matrix(self) -> None:
        matrix = torch.zeros((100, 480), dtype=torch.bfloat16, device=DEVICE)
        self.refused(r"matrix has shape \(48000,\), expected \(coefficients, channels\)", matrix=matrix.flatten())
        self.refused(r"matrix: .* \(100, 240\)", matrix=matrix[:, :240])
        self.refused("matrix: torch.float32", matrix=matrix.float())
        self.refused("its last dimension contiguous", matrix=torch.zeros_like(matrix).T.contiguous().T)

    def test_mean(self) -> None:
        self.refused(r"mean: .* \(2, 240\)", mean=torch.zeros((2, 240), device=DEVICE))
        self.refused("mean: torch.float64", mean=torch.zeros(480, dtype=torch.float64, device=DEVICE))

    def test_pixels(self) -> None:
        self.refused(r"pixels: .*, expected torch.int32 \(100,\)", pixels=torch.zeros(100, device=DEVICE))

    def test_rotation(self) -> None:
        for shape in ((62, 80), (63, 81), (63, 82), (63, 0), (63,)):
            self.refused("rotation", rotation=torch.zeros(shape, device=DEVICE))
        self.refused("rotation has strides", rotation=torch.zeros((63, 160), device=DEVICE)[:, :80])
        odd = Span(Case(Shape(20, 1, 1, 67)))
        with pytest.raises(ValueError, match="rotation of heads of 67 values"):
            restore_klt(
                odd.frames,
                odd.layout,
                odd.slots,
                odd.buffers(),
                **{**odd.arguments, "rotation": torch.zeros((20, 66), device=DEVICE)},
            )
