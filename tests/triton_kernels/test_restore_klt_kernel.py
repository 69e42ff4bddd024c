"""``restore_klt`` and its reference against sums in float64, and against the quantiser ``klt``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec import pack
from sgl_kvfetch.codec.quant.base import to_planes
from sgl_kvfetch.codec.quant.klt import EXACT, UNIT, scales_of
from sgl_kvfetch.codec.quant.rope import Rope, Rotations, rotate
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels import restore_klt as kernels
from sgl_kvfetch.triton_kernels.restore_klt import (
    OPTIONS,
    KltCell,
    KltModel,
    KltOptions,
    KltShape,
    klt_shape,
    restore_klt,
    restore_klt_reference,
    vector_of,
)
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    FP8_MANTISSA,
    jit,
    load_values,
    next_power_of_2,
    stored_values,
    tl,
)
from tests.triton_kernels.cases import (
    DEVICE,
    FLOATS,
    FP8,
    NUM_SLOTS,
    Shape,
    assert_same_bits,
    make_buffers,
    poisoned,
    scattered_slots,
)

pytestmark = pytest.mark.slow

FIRST_TOKEN = 1234
STEP = 0.5

Restore = Callable[[Sequence[KltCell], torch.Tensor, int], None]


def run_kernels(
    cells: Sequence[KltCell], slots: torch.Tensor, page_size: int, options: KltOptions = OPTIONS[0]
) -> None:
    table = torch.frombuffer(bytearray(b"".join(cell.row() for cell in cells)), dtype=torch.uint8).to(DEVICE)
    restore_klt(cells, table, slots, page_size, options)


def run_reference(cells: Sequence[KltCell], slots: torch.Tensor, page_size: int) -> None:
    for cell in cells:
        restore_klt_reference(cell, slots, page_size)


both = pytest.mark.parametrize("run", [run_kernels, run_reference], ids=["kernel", "reference"])


@dataclass(frozen=True)
class Case:
    tokens: int
    layers: int
    heads: int
    k_dim: int
    v_dim: int = 0  # 0: as K's
    coefficients: int = 100
    rotary_dim: int = 0
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16
    largest_mean: float = 4.0
    exact: tuple[int, ...] = ()  # tokens
    page_size: int = 1
    most_layers: int = 0  # of the largest cell in a launch; 0: as many as this has

    def shapes(self) -> tuple[Shape, Shape]:
        return tuple(Shape(self.tokens, self.layers, self.heads, dim) for dim in (self.k_dim, self.v_dim or self.k_dim))  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.tokens}x{self.layers}x{self.heads}x{self.k_dim} {self.coefficients}"


SMALL = Case(63, 2, 3, 80, 56)


@dataclass
class Span:
    """A cell, what it is restored with, and what it must become."""

    case: Case
    buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.buffers = tuple(make_buffers(shape, case.dtype) for shape in case.shapes())  # type: ignore[assignment]
        channels = [x.layers * x.heads * x.dim for x in case.shapes()]
        generator = torch.Generator().manual_seed(case.tokens + case.k_dim)
        self.integers = torch.randint(0, 256, (case.coefficients, case.tokens), generator=generator, dtype=torch.uint8)
        matrix = torch.randn((case.coefficients, sum(channels)), generator=generator) / case.coefficients**0.5
        self.matrix = matrix.to(torch.bfloat16).to(DEVICE)
        self.mean = (torch.randn(sum(channels), generator=generator) * case.largest_mean).to(DEVICE)
        self.exponents = torch.randint(UNIT - 3, UNIT + 3, (case.tokens,), generator=generator, dtype=torch.uint8)
        self.exponents[list(case.exact)] = EXACT
        self.exact = torch.randn((len(case.exact), sum(channels)), generator=generator).to(case.dtype)
        self.rope = (
            Rope(
                inv_freq=tuple((10000.0 ** -(torch.arange(case.rotary_dim // 2) * 2 / case.rotary_dim)).tolist()),
                attention_scaling=1.25,
                interleaved=case.interleaved,
            )
            if case.rotary_dim
            else None
        )
        # Layers have two rotations in turns, of which the second turns nothing. A single layer needs no choice.
        self.turns = [i % 2 if case.rotary_dim else 0 for i in range(case.layers)]
        self.rotations = None
        if self.rope is not None:
            still = Rope(inv_freq=(0.0,) * len(self.rope.inv_freq), interleaved=case.interleaved)
            rotations = Rotations((self.rope, still), tuple(self.turns))
            self.rotations = rotations.make_table(FIRST_TOKEN, case.tokens, DEVICE)
        self.slots = scattered_slots(-(-case.tokens // case.page_size) * case.page_size)

    @property
    def shape(self) -> KltShape:
        (k, *_), (v, *_) = self.buffers
        most = self.case.most_layers or self.case.layers
        return klt_shape(k, v, most, self.case.rotary_dim, interleaved=self.case.interleaved, mixed=any(self.turns))

    def cell(self, pages: Sequence[int] | None = None, **changes: Any) -> KltCell:
        """``pages``: of the span's pages among the slots; by default all in order."""
        case = self.case
        pages = range(-(-case.tokens // case.page_size)) if pages is None else pages
        scales = scales_of(torch.arange(256, dtype=torch.uint8)) * STEP
        model = KltModel(self.shape, self.matrix, self.mean, scales.to(DEVICE), *self.buffers, self.turns)
        exact = torch.stack(to_planes(self.exact), 1).flatten()
        table = torch.tensor(pages, dtype=torch.int32).numpy().tobytes()
        packed, num_exact = pack(self.exponents.numpy(), exact.numpy())
        data = torch.frombuffer(bytearray(b"\xab" * 16 + table + packed), dtype=torch.uint8)
        return KltCell(
            **{
                "model": model,
                "integers": self.integers.to(DEVICE),
                "rotations": self.rotations,
                "num_pages": len(pages),
                "num_exact": num_exact,
                "data": data.to(DEVICE),
                "offset": 16,
                **changes,
            }
        )

    def expected(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For K and V ``(tokens, layers, heads, dim)`` in float64, and how far float32 may be from it, in any order.

        A sum of C exact products is off by at most ``C * 2**-24`` of the sum of their magnitudes; a few roundings more
        follow, all of them of numbers no larger.
        """
        n, matrix, mean = self.integers.double().T - 128, self.matrix.double().cpu(), self.mean.double().cpu()
        scales = (scales_of(self.exponents) * STEP).double()[:, None]
        all_values = (n @ matrix) * scales + mean
        all_off = ((n.abs() @ matrix.abs()) * scales + mean.abs()) * (self.case.coefficients + 8) * 2.0**-24
        found, first = [], 0
        for tensor, shape in zip("kv", self.case.shapes(), strict=True):
            size = shape.tokens, shape.layers, shape.heads, shape.dim
            part = slice(first, first := first + size[1] * size[2] * size[3])
            values, off = (x[:, part].reshape(size) for x in (all_values, all_off))
            if self.rope is not None and tensor == "k":
                assert self.rotations is not None
                for layer, turn in enumerate(self.turns):
                    table, own = self.rotations[turn].double().cpu(), (slice(None), layer)
                    values[own] = rotate(values[own], table, self.rope)
                    half = self.case.rotary_dim // 2
                    other_way = torch.cat((table[:, :half].abs(), -table[:, half:].abs()), 1)
                    off[own] = rotate(off[own], other_way, self.rope).maximum(rotate(off[own], table.abs(), self.rope))
            exact = list(self.case.exact)
            values[exact], off[exact] = self.exact[:, part].double().view(-1, *size[1:]), 0.0
            found.append((values, off))
        return found

    def check(self, tokens: torch.Tensor | None = None, slots: torch.Tensor | None = None) -> None:
        """Some tokens, or all, in their slots, rounded once; nothing else written."""
        tokens = torch.arange(self.case.tokens) if tokens is None else tokens
        slots = self.slots.cpu()[tokens] if slots is None else slots
        info = torch.finfo(self.case.dtype)
        rest = torch.ones(NUM_SLOTS, dtype=torch.bool)
        rest[slots] = False
        for (values, off), buffers in zip(self.expected(), self.buffers, strict=True):
            values, off = values[tokens].clamp(-info.max, info.max), off[tokens]
            exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal)).exponent - 1
            tolerance = off + info.eps / 2 * torch.exp2(exponent.double())
            for layer, output in enumerate(buffers):
                error = (output.cpu()[slots].double() - values[:, layer]).abs()
                wrong = (error > tolerance[:, layer]).nonzero()[:1]
                assert len(wrong) == 0, (
                    f"layer {layer}, {wrong}: off by {error[tuple(wrong.T)]}, at most "
                    f"{tolerance[:, layer][tuple(wrong.T)]} of {values[:, layer][tuple(wrong.T)]}"
                )
                untouched = poisoned(*output.shape, dtype=output.dtype)
                assert_same_bits(output.cpu()[rest], untouched.cpu()[rest])


def run_case(run: Restore, case: Case) -> None:
    span = Span(case)
    run([span.cell()], span.slots, case.page_size)
    span.check()


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rotation", [{}, {"rotary_dim": 80}, {"rotary_dim": 80, "interleaved": True}], ids=["none", "neox", "gptj"]
)
def test_right_up_to_the_order_of_sums(rotation: dict[str, Any], dtype: torch.dtype, run: Restore) -> None:
    run_case(run, replace(SMALL, dtype=dtype, exact=(0, 1, 40), **rotation))


@both
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 48, coefficients=1, rotary_dim=48),
        Case(63, 3, 2, 128, coefficients=701, rotary_dim=128),
        Case(500, 1, 2, 64, coefficients=40, rotary_dim=64, interleaved=True),
        Case(100, 5, 1, 96, coefficients=33, rotary_dim=96),
        Case(1000, 2, 1, 80, coefficients=64, rotary_dim=80),
        Case(33, 1, 1, 256, coefficients=65, rotary_dim=192, interleaved=True),
        Case(20, 2, 1, 64, 300, coefficients=90, exact=(19,)),
        Case(7, 1, 6, 52, coefficients=90),
        Case(40, 1, 2, 67, coefficients=130),
        Case(17, 1, 1, 8, coefficients=15, rotary_dim=8),
        Case(129, 1, 1, 16, 32, coefficients=10, exact=tuple(range(0, 129, 3))),
        *(  # a part of each head is rotated
            Case(20, 1, 2, 80, coefficients=40, rotary_dim=rotary_dim, interleaved=interleaved)
            for rotary_dim in (2, 52, 78)
            for interleaved in (False, True)
        ),
    ],
    ids=str,
)
def test_shapes(case: Case, run: Restore) -> None:
    run_case(run, case)


@both
def test_cells_of_any_size_in_one_launch(run: Restore) -> None:
    """Of other lengths, coefficients, numbers of layers and exact tokens, each with its own slots."""
    cases = [
        Case(64, 3, 2, 16, coefficients=70, page_size=4, rotary_dim=16),
        Case(256, 1, 2, 16, coefficients=9, exact=(0, 150), page_size=4, rotary_dim=16, most_layers=3),
        Case(16, 2, 2, 16, coefficients=130, exact=(3,), page_size=4, rotary_dim=16, most_layers=3),
    ]
    spans = [Span(case) for case in cases]
    slots = scattered_slots(336)
    firsts = (0, 64, 320)
    cells = [
        span.cell(range(first // 4, (first + span.case.tokens) // 4)) for span, first in zip(spans, firsts, strict=True)
    ]
    assert {vector_of(cell.num_tokens) for cell in cells} == {16}
    run(cells, slots, 4)
    for span, first in zip(spans, firsts, strict=True):
        span.check(slots=slots.cpu()[first : first + span.case.tokens])


@both
@pytest.mark.parametrize("dtype", [torch.float16, *FP8], ids=str)
def test_values_past_the_largest_are_bounded(dtype: torch.dtype, run: Restore) -> None:
    case = replace(SMALL, dtype=dtype, largest_mean=1e5)
    assert bool((Span(case).expected()[0][0].abs() > torch.finfo(dtype).max).any())
    run_case(run, case)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """All its values, halves between them, numbers beside those, and any others."""
    every = torch.arange(256, dtype=torch.uint8)
    values = every.view(dtype).float()
    finite = values[values.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(halves, torch.tensor(sign * torch.inf)) for sign in (1, -1)]
    any_others = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.randint(-24, 6, (4096,))
    x = torch.cat([finite, halves, *beside, any_others, torch.tensor([0.0, -0.0, 1e-30, -1e-30])]).to(DEVICE)
    x = x[x.abs() <= torch.finfo(dtype).max]
    found = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    back = torch.empty(256, device=DEVICE)
    both_ways_kernel[(1,)](
        x, found, every.to(DEVICE), back, len(x), FP8_MANTISSA[dtype], next_power_of_2(len(x)), **COMPILE_OPTIONS
    )
    assert_same_bits(found, x.to(dtype).view(torch.uint8))
    is_finite = values.isfinite()
    assert_same_bits(back[is_finite.to(DEVICE)].cpu(), values[is_finite])
    assert bool(back.cpu()[~is_finite].isnan().all())


@jit  # type: ignore[untyped-decorator]
def both_ways_kernel(  # type: ignore[no-untyped-def]
    p_x, p_fp8, p_every, p_back, num_values, MANTISSA: tl.constexpr, BLOCK: tl.constexpr
):
    o_x, o_every = tl.arange(0, BLOCK), tl.arange(0, 256)
    b_x = tl.load(p_x + o_x, mask=o_x < num_values, other=0.0)
    tl.store(p_fp8 + o_x, stored_values(b_x, tl.uint8, MANTISSA), mask=o_x < num_values)
    tl.store(p_back + o_every, load_values(p_every + o_every, o_every < 256, MANTISSA))


@pytest.mark.parametrize(
    "case",
    [
        Case(144, 2, 1, 32, 16, coefficients=130, rotary_dim=32, exact=(3,)),
        Case(63, 1, 2, 80, coefficients=70, rotary_dim=52),
        Case(32, 1, 1, 64, coefficients=64, rotary_dim=64, interleaved=True),
    ],
    ids=str,
)
def test_all_options_give_the_same_bits(case: Case) -> None:
    """In bfloat16: the interpreter multiplies with NumPy, which may add up a transposed product in another order."""
    assert_options_agree(case, OPTIONS[2:])  # the second differs from the first by what `ptxas` is told, alone


def assert_options_agree(case: Case, every: Iterable[KltOptions]) -> None:
    """Compare what they give with what the first of `OPTIONS` gives."""
    expected = Span(case)
    run_kernels([expected.cell()], expected.slots, 1)
    for options in every:
        span = Span(case)
        run_kernels([span.cell()], span.slots, 1, options)
        for theirs, ours in zip(expected.buffers, span.buffers, strict=True):
            for x, y in zip(theirs, ours, strict=True):
                assert_same_bits(x, y)


@both
def test_pages_in_any_order_and_left_out(run: Restore) -> None:
    """Pages of three tokens. Also slots that are -1."""
    case = replace(SMALL, rotary_dim=80, page_size=3, exact=(0, 3, 62))
    span = Span(case)
    pages = [20 - i if i % 5 != 1 else -1 for i in range(21)]
    slots = span.slots.clone()
    slots[10 * 3 + 1] = -1
    run([span.cell(pages)], slots, 3)
    rows = [pages[t // 3] * 3 + t % 3 if pages[t // 3] >= 0 else -1 for t in range(63)]
    kept = [t for t, row in enumerate(rows) if row >= 0 and row != 31]
    assert len(kept) == 63 - 4 * 3 - 1
    span.check(torch.tensor(kept), span.slots.cpu()[[rows[t] for t in kept]])


@both
@pytest.mark.parametrize("num_slots", [0, 1, 38])
def test_pages_behind_the_last_slot_are_left_out(run: Restore, num_slots: int) -> None:
    """In memory, slots of another request follow. Exact tokens lie on both sides."""
    span = Span(replace(SMALL, rotary_dim=80, page_size=3, exact=(0, 35, 38, 62)))
    run([span.cell()], span.slots[:num_slots], 3)
    span.check(torch.arange(num_slots))


@both
def test_slots_and_heads_apart(run: Restore) -> None:
    span = Span(replace(SMALL, v_dim=80, rotary_dim=80, exact=(5,)))
    whole = [poisoned(2, NUM_SLOTS, 2, 3, 3, 80, dtype=torch.bfloat16) for _ in "kv"]
    span.buffers = tuple([layer[:, 1, :, 2] for layer in x] for x in whole)  # type: ignore[assignment]
    run([span.cell()], span.slots, 1)
    span.check()
    between = torch.ones(whole[0].shape, dtype=torch.bool, device=DEVICE)
    between[:, :, 1, :, 2] = False
    poison = poisoned(1, dtype=torch.bfloat16).view(torch.int16)
    assert all(bool((x.view(torch.int16)[between] == poison).all()) for x in whole)


@both
def test_slots_past_two_to_the_31(run: Restore) -> None:
    """Offsets that 32 bits do not hold. The memory is only reserved: what is not touched costs nothing."""
    near, far = (Span(Case(5, 1, 1, 256, rotary_dim=256, exact=(2,))) for _ in range(2))
    run([near.cell()], near.slots, 1)
    num_slots = 2**31 // 256 + 64
    far.buffers = tuple([torch.empty((num_slots, 1, 256), dtype=torch.bfloat16, device=DEVICE)] for _ in "kv")  # type: ignore[assignment]
    slots = num_slots - 1 - torch.arange(5, device=DEVICE) * 2
    run([far.cell()], slots, 1)
    for there, here in zip(far.buffers, near.buffers, strict=True):
        assert_same_bits(there[0][slots], here[0][near.slots])


def test_rows_of_zeros_write_nothing() -> None:
    """Kernels are compiled by launching them on one."""
    span = Span(SMALL)
    table = torch.zeros(2 * span.shape.row_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.launch_klt(span.shape, torch.bfloat16, 16, OPTIONS[0], table, span.slots, 1, 1, 1)
    span.check(torch.arange(0))


def buffers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [poisoned(1024, *shape, dtype=dtype)] * 2


BYTES = poisoned(6404, dtype=torch.uint8)
OFF = poisoned(1024 * 240 + 1, dtype=torch.bfloat16)[1:].view(1024, 3, 80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integers": BYTES[:6237].view(99, 63)}, r"expected contiguous uint8 \(100, 63\) at a multiple of 1 bytes"),
        ({"integers": poisoned(100, 126, dtype=torch.uint8)[:, :63]}, "expected contiguous uint8"),
        ({"integers": BYTES[4:].view(100, 64)}, r"\(100, 64\) at a multiple of 16 bytes"),
        ({"k": buffers(3, 80)[:1] * 3}, "3 layers of K, 2 of V"),
        ({"turns": [0, 1]}, "rotations of their own, and the shape has one"),
        ({"v": buffers(3, 56, dtype=torch.float16)}, "buffers are .*, expected"),
        ({"k": [OFF] * 2}, "does not begin at a multiple of 16 bytes"),
        ({"matrix": torch.zeros((100, 800), dtype=torch.bfloat16)}, r"matrix: .* \(100, 800\)"),
        ({"matrix": torch.zeros((816, 100), dtype=torch.bfloat16).T}, "expected contiguous"),
        ({"scales": torch.zeros(8, device=DEVICE)}, r"scales: .* expected contiguous torch.float32 \(256,\)"),
    ],
)
def test_a_cell_that_does_not_fit_together_is_named(changes: dict[str, Any], message: str) -> None:
    cell = Span(SMALL).cell()
    with pytest.raises(ValueError, match=message):
        replace(cell, **changes).row() if "integers" in changes else replace(cell.model, **changes)


def test_shapes_that_kernels_do_not_know_are_named() -> None:
    wide = {"k": buffers(3, 80, dtype=torch.float64), "v": buffers(3, 56, dtype=torch.float64)}
    with pytest.raises(UnsupportedError, match=r"have no torch\.float64: expected float32, .*float8_e5m2"):
        replace(Span(SMALL).cell().model, **wide)
    for rotary_dim, dim in ((81, 80), (82, 80), (66, 67)):
        (buffer, _) = buffers(1, dim)
        with pytest.raises(ValueError, match=f"rotation of {rotary_dim} of the {dim} values of a head"):
            klt_shape(buffer, buffer, 1, rotary_dim)
