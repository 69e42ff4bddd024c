"""restore, restore_klt, pack, frame_sum: their bits against the references, their speed against a device copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from benchmarks.kernel_bytes import Span, least_bytes
from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant.symmetric import ScaleOver
from sgl_kvfetch.triton_kernels.frame_sum import frame_sum, frame_sum_reference
from sgl_kvfetch.triton_kernels.pack import Packed, pack, pack_reference
from sgl_kvfetch.triton_kernels.restore import restore, restore_reference
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt, restore_klt_reference
from sgl_kvfetch.triton_kernels.runtime import integer_view
from sgl_kvfetch.triton_kernels.tuning import Key, Tuning, key_of

GOAL = 0.9  # of a copy's bytes a second
DTYPE = torch.bfloat16
POISON = 0xAB  # each byte that nobody has written

LATENT = Span(1024, heads=1, dim=576)  # MLA's
CHECKED = (Span(1000), LATENT, Span(63, heads=3, dim=80))
MEASURED = (Span(1024), LATENT, Span(32768))  # a chunk, MLA's, and what no cache holds


class Launch(Protocol):
    def __call__(self, tuning: Tuning | None = None) -> Sequence[torch.Tensor]: ...


class Reference(Protocol):
    def __call__(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class Case:
    """``launch`` runs the kernel and little else. It returns tensors to compare with those of ``reference``."""

    name: str
    launch: Launch
    reference: Reference
    num_bytes: int
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True)
class TunedCase(Case):
    """A kernel that is cut as the table says."""

    key: Key


def run(record: Record) -> None:
    device = torch.device("cuda")
    check(record, device, CHECKED)
    measure(record, device, MEASURED)


def check(record: Record, device: torch.device, spans: Sequence[Span]) -> None:
    for span in spans:
        for case in (sum_case(span, device), *cases(span, device)):
            found = difference(case.launch(), case.reference(), is_exact=case.is_exact)
            record.row("Kernels: bits", kernel=case.name, at=str(span), found=found or "as the reference's")
            if found:
                record.fail(f"{case.name}, {span}: {found}")


def measure(record: Record, device: torch.device, spans: Sequence[Span]) -> None:
    for span in spans:
        for case in (sum_case(span, device), *cases(span, device)):
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
            if share < GOAL and span == spans[-1]:
                record.note(f"{case.name}, {span}: {share:.0%} of a copy's speed; the goal is {GOAL:.0%}")


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, is_exact: bool) -> str:
    """What differs; nothing if nothing does."""
    for x, y in zip(ours, theirs, strict=True):
        if is_exact and not torch.equal(integer_view(x), integer_view(y)):
            return f"{int((integer_view(x) != integer_view(y)).sum())} of {x.numel()} values differ"
        if not is_exact:
            try:
                torch.testing.assert_close(x, y, rtol=2.0**-7, atol=1e-4)
            except AssertionError as e:
                return " ".join(str(e).split())
    return ""


def sum_case(span: Span, device: torch.device) -> Case:
    layout = default_layout(span.heads, span.dim, span.tokens)
    size = (layout.num_frames(span.tokens), 3, layout.height, layout.width)
    frames = torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    def launch(tuning: Tuning | None = None) -> list[torch.Tensor]:
        return [frame_sum(frames).view(torch.int32)]

    def reference() -> list[torch.Tensor]:
        return [frame_sum_reference(frames).view(torch.int32)]

    return Case("frame_sum", launch, reference, frames.nbytes)


def cases(span: Span, device: torch.device, dtype: torch.dtype = DTYPE) -> Iterator[TunedCase]:
    """Every operation that there is for buffers of this dtype; ``restore_klt`` not for one latent vector."""
    torch.manual_seed(0)
    layout = default_layout(span.heads, span.dim, span.tokens)
    slots = torch.randperm(span.tokens + 100, device=device)[: span.tokens]
    shape = (span.tokens, span.layers, span.heads, span.dim)
    frames = layout.to_frames(torch.randint(0, 255, shape, dtype=torch.uint8, device=device))
    outputs = Outputs(span, device, dtype)
    planes = [frames, frames.flip(0), frames, frames][: dtype.itemsize]
    yield _restore_case("restore exact", planes, layout, slots, outputs, None)
    buffers = [x.random_(0, 255) if dtype == torch.uint8 else x.normal_() for x in outputs.make()]
    yield _pack_case("pack exact", buffers, slots, layout, span, None)
    if not dtype.is_floating_point:
        return
    scales = (torch.rand(shape[:3], device=device) + 0.5).to(torch.bfloat16)
    yield _restore_case("restore symmetric", [frames], layout, slots, outputs, scales)
    yield _pack_case("pack symmetric", buffers, slots, layout, span, "head")
    yield _pack_case("pack symmetric, one scale", buffers, slots, layout, span, "layer")
    if span.dim == LATENT.dim:
        return
    for name, rotary_dim, interleaved in (("V", 0, False), ("K", span.dim, False), ("K, GPT-J", span.dim, True)):
        yield _klt_case(f"restore_klt {name}", frames, layout, slots, outputs, rotary_dim, interleaved)


@dataclass(frozen=True)
class Outputs:
    """KV buffers of a layer group, with some slots more than there are tokens."""

    span: Span
    device: torch.device
    dtype: torch.dtype

    def make(self) -> list[torch.Tensor]:
        size = (self.span.tokens + 100, self.span.heads, self.span.dim * self.dtype.itemsize)
        poison = [torch.full(size, POISON, dtype=torch.uint8, device=self.device) for _ in range(self.span.layers)]
        return [x.view(self.dtype) for x in poison]


def _restore_case(
    name: str,
    frames: list[torch.Tensor],
    layout: FrameLayout,
    slots: torch.Tensor,
    outputs: Outputs,
    scales: torch.Tensor | None,
) -> TunedCase:
    ours, theirs = outputs.make(), outputs.make()
    centres = None if scales is None else [127] * len(ours)

    def launch(tuning: Tuning | None = None) -> list[torch.Tensor]:
        restore(frames, layout, slots, ours, scales=scales, centres=centres, tuning=tuning)
        return ours

    def reference() -> list[torch.Tensor]:
        restore_reference(frames, layout, slots, theirs, scales, centres, 0)
        return theirs

    is_exact = scales is None
    key = key_of("restore_exact" if is_exact else "restore_symmetric", integer_view(ours[0]) if is_exact else ours[0])
    num_bytes = least_bytes(key.operation, outputs.span, outputs.dtype.itemsize)
    return TunedCase(name, launch, reference, num_bytes, key=key)


def _pack_case(
    name: str,
    buffers: list[torch.Tensor],
    slots: torch.Tensor,
    layout: FrameLayout,
    span: Span,
    scale_over: ScaleOver | None,
) -> TunedCase:
    centres = None if scale_over is None else [127] * len(buffers)
    over: ScaleOver = scale_over or "head"

    def launch(tuning: Tuning | None = None) -> list[torch.Tensor]:
        return _packed(pack(buffers, slots, layout, centres=centres, scale_over=over, tuning=tuning))

    def reference() -> list[torch.Tensor]:
        return _packed(pack_reference(buffers, slots, layout, centres, over))

    key = key_of("pack_exact", integer_view(buffers[0])) if centres is None else key_of(f"pack_{over}", buffers[0])
    num_bytes = least_bytes(key.operation, span, buffers[0].itemsize)
    return TunedCase(name, launch, reference, num_bytes, key=key)


def _klt_case(
    name: str,
    frames: torch.Tensor,
    layout: FrameLayout,
    slots: torch.Tensor,
    outputs: Outputs,
    rotary_dim: int,
    interleaved: bool,
) -> TunedCase:
    span, device = outputs.span, outputs.device
    ours, theirs = outputs.make(), outputs.make()
    scales = (torch.rand((span.tokens, span.layers, 1), device=device) + 0.5).to(torch.bfloat16)
    matrices = torch.randn((span.layers, span.heads, span.dim, span.dim), device=device)
    inverse = (matrices / math.sqrt(span.dim)).to(torch.bfloat16)
    means = torch.randn((span.layers, span.heads, span.dim), device=device)
    angles = torch.rand((span.tokens, rotary_dim // 2), device=device)
    rotation = torch.cat([angles.cos(), angles.sin()], dim=1) if rotary_dim else None

    def launch(tuning: Tuning | None = None) -> list[torch.Tensor]:
        restore_klt(
            frames,
            layout,
            slots,
            ours,
            scales=scales,
            inverse=inverse,
            step=0.05,
            means=means,
            rotation=rotation,
            interleaved=interleaved,
            tuning=tuning,
        )
        return ours

    def reference() -> list[torch.Tensor]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            restore_klt_reference(
                frames, layout, slots, theirs, scales, inverse, 0.05, means, rotation, interleaved, first_frame=0
            )
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return theirs

    key = key_of("restore_klt_interleaved" if interleaved else "restore_klt", ours[0])
    num_bytes = least_bytes(key.operation, span, outputs.dtype.itemsize, rotary_dim=rotary_dim)
    return TunedCase(name, launch, reference, num_bytes, is_exact=False, key=key)


def _packed(found: Packed) -> list[torch.Tensor]:
    return [found.frames, *([] if found.scales is None else [found.scales])]
