"""The kernels that restore a cell of `exact`, `uint8` or `cachegen`, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec import CellFrames
from sgl_kvfetch.codec.layout import TileLayout
from sgl_kvfetch.codec.quant import ByteInverse, StepInverse
from sgl_kvfetch.triton_kernels.restore import restore

CellOutputs = tuple[list[torch.Tensor], list[torch.Tensor]]  # K's and V's buffers, one a layer


@dataclass(frozen=True)
class Restore:
    """A kernel's work on one cell.

    ``kind``: works share compiled code if their kinds and numbers of layers are equal. ``parts``: indices of
    the cell's parts whose frames the kernel reads, all or some at a time. ``fixed``: its other inputs, on the host.
    ``launch(slots, fixed, frames, first_frame)`` runs it on device tensors, and leaves out tokens whose slot is -1.
    """

    kind: Hashable
    parts: tuple[int, ...]
    fixed: tuple[torch.Tensor, ...]
    launch: Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], int], None]


def restores_of(cell: CellFrames, inverse: ByteInverse | StepInverse, outputs: CellOutputs) -> Iterator[Restore]:
    """Yield the works that restore a cell, for K and for V."""
    match inverse:
        case ByteInverse():
            size = len(cell.parts) // 2
            for first, buffers in zip((0, size), outputs, strict=True):
                yield _exact(cell, tuple(range(first, first + size)), buffers)
        case StepInverse(k_centres, v_centres):
            for first, centres, buffers in zip((0, 2), (k_centres, v_centres), outputs, strict=True):
                yield _symmetric(cell, first, centres, buffers)


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
        lambda slots, fixed, frames, first: restore(frames, layout, slots, buffers, first_frame=first),
    )


def _symmetric(cell: CellFrames, first: int, centres: tuple[int, ...], buffers: list[torch.Tensor]) -> Restore:
    layout = _tiles(cell, first + 1)
    scales = cell.parts[first].view(torch.bfloat16).view(len(cell.place.tokens), len(cell.layers), -1)
    return Restore(
        ("symmetric", layout),
        (first + 1,),
        (scales,),
        lambda slots, fixed, frames, first: restore(
            frames, layout, slots, buffers, scales=fixed[0], centres=centres, first_frame=first
        ),
    )
