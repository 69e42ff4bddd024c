"""Draws the demo's picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.report import COLOURS, figure
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.segment import SegmentReader, layouts_of
from sgl_kvfetch.codec.quant.registry import quantiser_from_identity
from sgl_kvfetch.plane.client import RESOLUTION


def draw(path: Path, times_s: Mapping[str, float], title: str, store: Path) -> None:
    """Draw the times to first token, and beside them the first frame of the longest segment in the folder ``store``."""
    with figure(path, title, columns=2, figsize=(11, 4.2)) as (_, ((left, right),)):
        bars = left.barh(list(times_s), list(times_s.values()), color=COLOURS)
        left.bar_label(bars, fmt="%.2f s", padding=4)
        left.margins(x=0.15)
        left.invert_yaxis()
        left.set(xlabel="time to first token (s)")
        right.imshow(_first_frame(store), interpolation="nearest")
        right.set(title="the KV cache as a picture: three colour planes", xticks=[], yticks=[])


def _first_frame(store: Path) -> np.ndarray:
    """Return uint8 ``(height, width, 3)``."""
    file = max(store.glob("*/*.kvm"), key=lambda found: found.stat().st_size)  # of the longest segment
    manifest = decode_manifest(file.read_bytes())
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    data = (store / reader.data_name).read_bytes()
    cell = next(iter(manifest.cells()))
    start, end = reader.cell_range(cell)
    parts = zip(manifest.parts, reader.decode_cell(cell, data[start:end]), strict=True)
    part, integers = [each for each in parts if each[0].layout][-1]
    layout = layouts_of(manifest, reader.quantiser, RESOLUTION)[part.layout]
    picture: np.ndarray = layout.to_frames(integers)[0].numpy().transpose(1, 2, 0)
    return picture
