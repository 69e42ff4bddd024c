"""Checks the results of restore_klt against the reference, and its speed against a copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from sgl_kvfetch.codec import pack
from sgl_kvfetch.triton_kernels.klt_choice import choose_options
from sgl_kvfetch.triton_kernels.restore_klt import (
    KltCell,
    KltModel,
    KltOptions,
    KltShape,
    klt_shape,
    restore_klt,
    restore_klt_reference,
)

GOAL = 0.9  # relative to the bytes per second of a copy
DTYPE = torch.bfloat16
POISON = 0xAB  # initial value of each byte, to detect wrong writes
_SPARE_SLOTS = 100
_SLOT_BYTES = 8
_EXPONENT_BYTES = 1  # of a token's step width
_MATRIX_VALUE_BYTES = 2  # bfloat16
_MEAN_BYTES = _ANGLE_BYTES = 4  # float32


@dataclass(frozen=True)
class Span:
    """The tokens of one call, and their shape. ``coefficients``: per token."""

    tokens: int
    coefficients: int
    heads: int
    dim: int = 128
    layers: int = 3

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.heads} heads of {self.dim}, {self.coefficients} coefficients"

    @property
    def num_channels(self) -> int:
        return self.layers * self.heads * self.dim

    @property
    def num_values(self) -> int:
        return self.tokens * self.num_channels


# A usual size and an odd one. MEASURED also has spans too large for any cache.
CHECKED = Span(1000, heads=2, coefficients=700), Span(63, heads=1, dim=80, coefficients=129)
MEASURED = tuple(Span(tokens, heads=2, coefficients=700) for tokens in (1024, 8192, 32768))

Launch = Callable[[], Sequence[torch.Tensor]]
Choice = Callable[[KltShape, torch.dtype, int, torch.device], tuple[KltOptions, str]]


@dataclass(frozen=True)
class Case:
    """``launch`` runs the kernel and little else. It returns tensors to compare with those of ``reference``."""

    name: str
    launch: Launch
    reference: Launch
    num_bytes: int


def run(record: Record) -> None:
    device = torch.device("cuda", 0)
    check(record, device, CHECKED)
    measure(record, device, MEASURED)
    choose(record, device, MEASURED[0])


def check(record: Record, device: torch.device, spans: Sequence[Span]) -> None:
    for span in spans:
        for case in itertools.chain(cases(span, device), cases_in_fp8(span, device)):
            found = difference(case.launch(), case.reference())
            record.row("Kernels: bits", kernel=case.name, at=str(span), found=found or "as the reference's")
            if found:
                record.fail(f"{case.name}, {span}: {found}")


def measure(record: Record, device: torch.device, spans: Sequence[Span]) -> None:
    """Measure the speeds. Only the longest spans, which do not fit into a cache, have to reach the goal."""
    longest = max(span.tokens for span in spans)
    for span in spans:
        for case in cases(span, device):
            copied = torch.empty(case.num_bytes // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(copied)
            copy_s = seconds_of(lambda copied=copied, target=target: target.copy_(copied), device)  # type: ignore[misc]
            kernel_s = seconds_of(case.launch, device)
            share = copy_s / kernel_s
            record.row(
                "Kernels: speed against a device copy of as many bytes",
                kernel=case.name,
                at=str(span),
                us=1e6 * kernel_s,
                copy_us=1e6 * copy_s,
                gb_a_second=case.num_bytes / kernel_s / 1e9,
                share_of_copy=share,
            )
            if share < GOAL and span.tokens == longest:
                record.note(f"{case.name}, {span}: {share:.0%} of a copy's speed; the goal is {GOAL:.0%}")


def choose(record: Record, device: torch.device, span: Span, chosen: Choice = choose_options) -> None:
    """Say how fast each of the ways is in which `restore_klt` may be compiled, and which a server takes here."""
    for name, rotary_dim in ("", 0), (" NeoX", span.dim):
        buffer = _buffers(span, device)[0]
        shape = klt_shape(buffer, buffer, span.layers, rotary_dim, interleaved=False)
        _, about = chosen(shape, DTYPE, span.coefficients, device)
        record.row("Kernels: how restore_klt is compiled", kernel=f"restore_klt{name}", found=about)


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str:
    """Describe the difference; return an empty string if there is none."""
    for x, y in zip(ours, theirs, strict=True):
        info = torch.finfo(x.dtype)
        atol = max(1e-4, info.smallest_normal)
        try:
            torch.testing.assert_close(x.float(), y.float(), rtol=info.eps, atol=atol)
        except AssertionError as e:
            return " ".join(str(e).split())
    return ""


def cases(span: Span, device: torch.device) -> Iterator[Case]:
    """Yield ``restore_klt`` of this span, without a rotation and with each kind."""
    torch.manual_seed(0)
    slots = torch.randperm(span.tokens + _SPARE_SLOTS, device=device)[: span.tokens]
    integers = torch.randint(0, 256, (span.coefficients, span.tokens), dtype=torch.uint8, device=device)
    for name, rotary_dim, interleaved in (("", 0, False), (" NeoX", span.dim, False), (" GPT-J", span.dim, True)):
        yield _klt_case(f"restore_klt{name}", span, integers, slots, rotary_dim, interleaved)


def cases_in_fp8(span: Span, device: torch.device) -> Iterator[Case]:
    """Yield the same of a pool in fp8, which are not timed: they write half the bytes."""
    torch.manual_seed(0)
    slots = torch.randperm(span.tokens + _SPARE_SLOTS, device=device)[: span.tokens]
    integers = torch.randint(0, 256, (span.coefficients, span.tokens), dtype=torch.uint8, device=device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield _klt_case(f"restore_klt {dtype}", span, integers, slots, span.dim, False, dtype)


def _buffers(span: Span, device: torch.device, dtype: torch.dtype = DTYPE) -> list[torch.Tensor]:
    """Return the buffers of a layer group, those of K, then those of V, with some more slots than tokens."""
    size = (span.tokens + _SPARE_SLOTS, span.heads, span.dim * dtype.itemsize)
    poison = [torch.full(size, POISON, dtype=torch.uint8, device=device) for _ in range(2 * span.layers)]
    return [x.view(dtype) for x in poison]


def _klt_case(
    name: str,
    span: Span,
    integers: torch.Tensor,
    slots: torch.Tensor,
    rotary_dim: int,
    interleaved: bool,
    dtype: torch.dtype = DTYPE,
) -> Case:
    device = slots.device
    ours, theirs = _buffers(span, device, dtype), _buffers(span, device, dtype)
    steps = 0.05 * (torch.rand(256, device=device) + 0.5)
    exponents = torch.randint(1, 256, (span.tokens,), dtype=torch.uint8)
    matrix = torch.randn((span.coefficients, 2 * span.num_channels), device=device) / math.sqrt(span.coefficients)
    mean = torch.randn(2 * span.num_channels, device=device)
    angles = torch.rand((span.tokens, rotary_dim // 2), device=device)
    rotations = torch.cat([angles.cos(), angles.sin()], dim=1)[None] if rotary_dim else None
    shape = klt_shape(ours[0], ours[0], span.layers, rotary_dim, interleaved=interleaved)
    pages = torch.arange(span.tokens, dtype=torch.int32).numpy().tobytes()  # of one token
    packed, num_exact = pack(exponents.numpy(), exponents[:0].numpy())
    data = torch.frombuffer(bytearray(pages + packed), dtype=torch.uint8).to(device)

    def make_cell(buffers: list[torch.Tensor]) -> KltCell:
        k, v = buffers[: span.layers], buffers[span.layers :]
        model = KltModel(shape, matrix.to(torch.bfloat16), mean, steps, k, v, [0] * span.layers)
        return KltCell(model, integers, rotations, span.tokens, num_exact, data, 0)

    mine, its = make_cell(ours), make_cell(theirs)
    table = torch.frombuffer(bytearray(mine.row()), dtype=torch.uint8).to(device)

    def launch() -> list[torch.Tensor]:
        restore_klt([mine], table, slots, 1)
        return ours

    def reference() -> list[torch.Tensor]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            restore_klt_reference(its, slots, 1)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return theirs

    return Case(name, launch, reference, restore_klt_bytes(span, dtype.itemsize, rotary_dim))


def restore_klt_bytes(span: Span, itemsize: int, rotary_dim: int) -> int:
    """Return the least bytes that restoring K and V reads and writes. ``itemsize``: bytes of a value in the KV buffers.
    ``rotary_dim``: rotated channels per head of K."""
    a_token = span.coefficients + _EXPONENT_BYTES + _SLOT_BYTES + rotary_dim * _ANGLE_BYTES
    a_channel = span.coefficients * _MATRIX_VALUE_BYTES + _MEAN_BYTES
    return span.tokens * a_token + 2 * (span.num_channels * a_channel + span.num_values * itemsize)
