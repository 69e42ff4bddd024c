"""restore, restore_klt, pack, frame_sum: their bits against the references, their speed against a device copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.triton_kernels.frame_sum import frame_sum, frame_sum_reference
from sgl_kvfetch.triton_kernels.pack import Packed, pack, pack_reference
from sgl_kvfetch.triton_kernels.restore import restore, restore_reference
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt, restore_klt_reference
from sgl_kvfetch.triton_kernels.runtime import integer_view

GOAL = 0.9  # of a copy's bytes a second
LAYERS = 3
DTYPE = torch.bfloat16
_CENTRES = [127] * LAYERS


@dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int = 8
    dim: int = 128

    @property
    def num_values(self) -> int:
        return self.tokens * LAYERS * self.heads * self.dim


CHECKED = (Shape(1000), Shape(1024), Shape(63, heads=3, dim=80))
MEASURED = (Shape(1024), Shape(32768))  # a span, and what no cache holds


@dataclass(frozen=True)
class Case:
    """``kernel`` and ``reference`` return tensors to compare; ``launch`` runs the kernel and nothing else."""

    name: str
    kernel: Callable[[], Sequence[torch.Tensor]]
    reference: Callable[[], Sequence[torch.Tensor]]
    launch: Callable[[], object]
    num_bytes: int  # that must cross memory: docs/kernels.md, "Bytes a value"
    is_exact: bool = True


def run(record: Record) -> None:
    device = torch.device("cuda")
    check(record, device, CHECKED)
    measure(record, device, MEASURED)


def check(record: Record, device: torch.device, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        for case in cases(shape, device):
            difference = _difference(case)
            at = f"{shape.tokens} tokens, {shape.heads} heads of {shape.dim}"
            record.row("Kernels: bits", kernel=case.name, at=at, found=difference or "as the reference's")
            if difference:
                record.fail(f"{case.name}, {at}: {difference}")


def measure(record: Record, device: torch.device, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        for case in cases(shape, device):
            copied = torch.empty(case.num_bytes // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(copied)
            copy_s = seconds_of(lambda copied=copied, target=target: target.copy_(copied), device)  # type: ignore[misc]
            kernel_s = seconds_of(case.launch, device)
            share = copy_s / kernel_s
            record.row(
                "Kernels: speed against a device copy of as many bytes",
                kernel=case.name,
                tokens=shape.tokens,
                us=1e6 * kernel_s,
                copy_us=1e6 * copy_s,
                gb_a_second=case.num_bytes / kernel_s / 1e9,
                share_of_copy=share,
            )
            if share < GOAL and shape == shapes[-1]:
                record.note(
                    f"{case.name}, {shape.tokens} tokens: {share:.0%} of a copy's speed; the goal is {GOAL:.0%}"
                )


def _difference(case: Case) -> str:
    """What differs; nothing if nothing does."""
    for ours, theirs in zip(case.kernel(), case.reference(), strict=True):
        if case.is_exact and not torch.equal(integer_view(ours), integer_view(theirs)):
            count = int((integer_view(ours) != integer_view(theirs)).sum())
            return f"{count} of {ours.numel()} values differ"
        if not case.is_exact:
            try:
                torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-4, equal_nan=True)
            except AssertionError as e:
                return " ".join(str(e).split())
    return ""


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    torch.manual_seed(0)
    layout = default_layout(shape.heads, shape.dim, shape.tokens)
    slots = torch.randperm(shape.tokens + 100, device=device)[: shape.tokens]
    integers = torch.randint(0, 255, (shape.tokens, LAYERS, shape.heads, shape.dim), dtype=torch.uint8, device=device)
    frames = layout.to_frames(integers)
    slot_bytes = slots.nbytes
    yield Case(
        "frame_sum",
        lambda: [frame_sum(frames).view(torch.int32)],
        lambda: [frame_sum_reference(frames).view(torch.int32)],
        lambda: frame_sum(frames),
        frames.nbytes,
    )
    yield _restore_case("restore exact", [frames, frames.flip(0)], layout, slots, shape, None, 4)
    scales = (torch.rand((shape.tokens, LAYERS, shape.heads), device=device) + 0.5).to(DTYPE)
    yield _restore_case("restore symmetric", [frames], layout, slots, shape, scales, 3)
    for is_key in (True, False):
        yield _klt_case(frames, layout, slots, shape, is_key)
    buffers = [torch.randn(shape.tokens + 100, shape.heads, shape.dim, device=device).to(DTYPE) for _ in range(LAYERS)]
    for centres, bytes_a_value in ((None, 4), (_CENTRES, 3)):
        yield Case(
            "pack exact" if centres is None else "pack symmetric",
            lambda centres=centres: _packed(pack(buffers, slots, layout, centres=centres)),  # type: ignore[misc]
            lambda centres=centres: _packed(pack_reference(buffers, slots, layout, centres, "head")),  # type: ignore[misc]
            lambda centres=centres: pack(buffers, slots, layout, centres=centres),  # type: ignore[misc]
            shape.num_values * bytes_a_value + slot_bytes,
        )


def _restore_case(
    name: str,
    frames: list[torch.Tensor],
    layout: FrameLayout,
    slots: torch.Tensor,
    shape: Shape,
    scales: torch.Tensor | None,
    bytes_a_value: int,
) -> Case:
    ours, theirs = _outputs(shape, slots.device), _outputs(shape, slots.device)
    centres = None if scales is None else _CENTRES

    def launch() -> list[torch.Tensor]:
        restore(frames, layout, slots, ours, scales=scales, centres=centres)
        return ours

    def reference() -> list[torch.Tensor]:
        restore_reference(frames, layout, slots, theirs, scales, centres, 0)
        return theirs

    scale_bytes = 0 if scales is None else scales.nbytes
    return Case(name, launch, reference, launch, shape.num_values * bytes_a_value + slots.nbytes + scale_bytes)


def _klt_case(frames: torch.Tensor, layout: FrameLayout, slots: torch.Tensor, shape: Shape, is_key: bool) -> Case:
    device = slots.device
    ours, theirs = _outputs(shape, device), _outputs(shape, device)
    scales = (torch.rand((shape.tokens, LAYERS, 1), device=device) + 0.5).to(DTYPE)
    inverse = (torch.randn((LAYERS, shape.heads, shape.dim, shape.dim), device=device) / math.sqrt(shape.dim)).to(DTYPE)
    means = torch.randn((LAYERS, shape.heads, shape.dim), device=device)
    angles = torch.rand((shape.tokens, shape.dim // 2), device=device)
    rotation = torch.cat([angles.cos(), angles.sin()], dim=1) if is_key else None

    def launch() -> list[torch.Tensor]:
        restore_klt(
            frames, layout, slots, ours, scales=scales, inverse=inverse, step=0.05, means=means, rotation=rotation
        )
        return ours

    def reference() -> list[torch.Tensor]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            restore_klt_reference(
                frames, layout, slots, theirs, scales, inverse, 0.05, means, rotation, interleaved=False, first_frame=0
            )
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return theirs

    num_bytes = shape.num_values * 3 + slots.nbytes + scales.nbytes + (0 if rotation is None else rotation.nbytes)
    return Case(f"restore_klt {'K' if is_key else 'V'}", launch, reference, launch, num_bytes, is_exact=False)


def _outputs(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    size = (shape.tokens + 100, shape.heads, shape.dim)
    return [torch.full(size, float("nan"), dtype=DTYPE, device=device) for _ in range(LAYERS)]


def _packed(found: Packed) -> list[torch.Tensor]:
    return [found.frames, *([] if found.scales is None else [found.scales])]
