"""Compiles the restore kernels before the first fetch needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from sgl_kvfetch.codec import CellFrames, CellValues, SegmentSpec, cell_place
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.plane import FramePool

logger = logging.getLogger(__name__)


def compile_kernels(pages: FramePool, spec: SegmentSpec) -> None:
    """Compile the kernels for full spans of segments that ``spec`` writes; this takes seconds. Kernels for what other
    servers wrote in another way are compiled when they are first needed. Writes nothing. Raises nothing."""
    try:
        for cell in _blank_cells(spec):
            pages.restore(cell, (), (), lambda write: True)
    except Exception:
        logger.warning("kvfetch: the restore kernels were not compiled at the start", exc_info=True)


def _blank_cells(spec: SegmentSpec) -> Iterator[CellFrames]:
    """Yield a cell of zeros for each number of layers that cells have."""
    manifest = spec.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * spec.span_pages)
    layouts, geometry = spec.layouts(manifest), manifest.geometry
    done: set[int] = set()
    for cell in manifest.span_cells(0):
        layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
        if len(layers) in done:
            continue
        done.add(len(layers))
        place = cell_place(manifest, cell)
        shape = len(place.tokens), len(layers), len(heads)
        zeros = (
            torch.zeros(*shape, dim, dtype=geometry.torch_dtype) for dim in (geometry.k_head_dim, geometry.v_head_dim)
        )
        parts = spec.quantiser.quantise(CellValues(*zeros), place)
        rows = zip(manifest.parts, parts, strict=True)
        yield CellFrames(
            place=place,
            layers=layers,
            heads=heads,
            parts=tuple(layouts[part.layout].to_frames(x) if part.layout else x for part, x in rows),
            layouts=tuple(layouts[part.layout] if part.layout else None for part in manifest.parts),
            is_on_device=(False,) * len(parts),
            quantiser=spec.quantiser,
        )
