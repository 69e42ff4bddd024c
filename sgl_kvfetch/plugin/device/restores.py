"""The kernels that restore a cell, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec import (
    ByteInverse,
    CellFrames,
    Inverse,
    KltQuantiser,
    RegionLayout,
    StepInverse,
    TileLayout,
    TransformInverse,
    scales_of,
)
from sgl_kvfetch.triton_kernels.restore import restore
from sgl_kvfetch.triton_kernels.restore_klt import region_pixels, restore_klt
from sgl_kvfetch.types import TENSORS

CellOutputs = tuple[list[torch.Tensor], list[torch.Tensor]]  # K's and V's buffers, one a layer

# Calls a function with hashable arguments, and keeps the tensor that it returns on the device for the next call.
Resident = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Restore:
    """A kernel's work on one cell.

    ``kind``: works share compiled code if their kinds and numbers of layers are equal. ``parts``: indices of
    the cell's parts whose frames the kernel reads. ``fixed``: its other inputs, on the host. ``by_frame``: whether it
    can restore some frames at a time. ``launch(slots, fixed, frames, first_frame)`` runs it on device tensors, and
    leaves out tokens whose slot is -1. Call ``finish(slots, fixed)`` after it.
    """

    kind: Hashable
    parts: tuple[int, ...]
    fixed: tuple[torch.Tensor, ...]
    by_frame: bool
    launch: Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], int], None]
    finish: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] = lambda slots, fixed: None


def restores_of(
    cell: CellFrames, inverse: Inverse, wanted: torch.Tensor, outputs: CellOutputs, resident: Resident
) -> Iterator[Restore]:
    """Yield the works that restore a cell. The tensors of ``inverse`` are on the device. ``wanted``: bool ``(tokens,)``
    on the host, whether a token has a slot. ``resident`` returns tables on the device."""
    match inverse:
        case ByteInverse():
            size = len(cell.parts) // 2
            for first, buffers in zip((0, size), outputs, strict=True):
                yield _exact(cell, tuple(range(first, first + size)), buffers)
        case StepInverse(k_centres, v_centres):
            for first, centres, buffers in zip((0, 2), (k_centres, v_centres), outputs, strict=True):
                yield _symmetric(cell, first, centres, buffers)
        case TransformInverse():
            yield _transformed(cell, inverse, wanted, outputs, resident)


def _tiles(cell: CellFrames, part: int) -> TileLayout:
    layout = cell.layouts[part]
    assert isinstance(layout, TileLayout)
    return layout


def _exact(cell: CellFrames, parts: tuple[int, ...], buffers: list[torch.Tensor]) -> Restore:
    layout = _tiles(cell, parts[0])
    return Restore(
        ("exact", layout),
        parts,
        (),
        True,
        lambda slots, fixed, frames, first: restore(frames, layout, slots, buffers, first_frame=first),
    )


def _symmetric(cell: CellFrames, first: int, centres: tuple[int, ...], buffers: list[torch.Tensor]) -> Restore:
    layout = _tiles(cell, first + 1)
    scales = cell.parts[first].view(torch.bfloat16).view(len(cell.place.tokens), len(cell.layers), -1)
    return Restore(
        ("symmetric", layout),
        (first + 1,),
        (scales,),
        True,
        lambda slots, fixed, frames, first: restore(
            frames, layout, slots, buffers, scales=fixed[0], centres=centres, first_frame=first
        ),
    )


def _transformed(
    cell: CellFrames, inverse: TransformInverse, wanted: torch.Tensor, outputs: CellOutputs, resident: Resident
) -> Restore:
    quantiser, layout = cell.quantiser, cell.layouts[2]
    assert isinstance(quantiser, KltQuantiser)
    assert isinstance(layout, RegionLayout)
    rope = inverse.rope
    fixed: tuple[torch.Tensor, ...] = (scales_of(cell.parts[0]) * quantiser.step,)
    if cell.parts[1].numel():  # bytes of exact tokens
        which, exact = quantiser.exact_tokens(cell.parts, outputs[0][0].dtype, cell.place)
        kept = wanted[which]
        fixed += which[kept], exact.k[kept], exact.v[kept]
    rotation = None
    if rope is not None:
        rotation = resident(rope.table, cell.place.tokens.start, len(cell.place.tokens))
    pixels = resident(region_pixels, layout, len(inverse.matrix))
    num_k = sum(x[0].numel() for x in outputs[0])

    def launch(
        slots: torch.Tensor, fixed: Sequence[torch.Tensor], frames: Sequence[torch.Tensor], first_frame: int
    ) -> None:
        assert not first_frame
        for tensor, channels, buffers in zip(TENSORS, (slice(num_k), slice(num_k, None)), outputs, strict=True):
            restore_klt(
                frames[0],
                layout,
                slots,
                buffers,
                scales=fixed[0],
                matrix=inverse.matrix[:, channels],
                mean=inverse.mean[channels],
                pixels=pixels,
                rotation=rotation if tensor == "k" else None,
                interleaved=rope is not None and rope.interleaved,
            )

    def finish(slots: torch.Tensor, fixed: Sequence[torch.Tensor]) -> None:
        exact_slots = slots[fixed[1]]
        for values, buffers in zip(fixed[2:], outputs, strict=True):
            for layer, buffer in enumerate(buffers):
                buffer.index_copy_(0, exact_slots, values[:, layer])

    return Restore("transformed", (2,), fixed, False, launch, finish if len(fixed) > 1 else lambda slots, fixed: None)
