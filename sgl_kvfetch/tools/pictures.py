"""Draws a segment's frames as a PNG. Importing this module loads torch, codecs and Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import groupby, islice

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sgl_kvfetch.codec import Cell, Layout, Manifest, Quantised, SegmentReader, layouts_of, quantiser_from_identity
from sgl_kvfetch.codec.layout.frames import FILL
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores import AdminStore
from sgl_kvfetch.types import first_to_last

THUMBNAIL_SIDE = 432  # pixels, at most
MAX_SHEET_ROWS = 24
_MOST_FRAMES_BYTES = 64 << 20  # of a cell: drawing takes three times as much, and a few bytes may decode to gigabytes
_RESOLUTION = "240p"
_MARGIN = 12
_TEXT_HEIGHT = 15
_FONT = ImageFont.load_default(size=_TEXT_HEIGHT)


async def draw_sheet(store: AdminStore, manifest: Manifest, span: int) -> bytes:
    """Return the contact sheet of a span as a PNG: the first frame of each chunk, a row a cell and a column a part.

    Decodes the cells that it shows, one by one. The contrast is stretched, because some planes use few values. Raises
    ConfigError, also if a cell has more than 64 MiB of frames, and StoreError if the data cannot be read.
    """
    if span >= manifest.num_spans:
        raise ConfigError(f"--span {span}: the segment has {manifest.num_spans}, counted from 0")
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    rows: dict[Cell, dict[int, np.ndarray]] = {}  # thumbnails by the part's index
    for cell in islice(manifest.span_cells(span), MAX_SHEET_ROWS):
        rows[cell] = dict(_thumbnails(reader, await _decoded(store, reader, cell)))
    png = BytesIO()
    _drawn(manifest, rows).save(png, format="PNG")
    return png.getvalue()


async def _decoded(store: AdminStore, reader: SegmentReader, cell: Cell) -> Quantised:
    if (num_bytes := reader.frames_bytes(cell)) > _MOST_FRAMES_BYTES:
        raise ConfigError(f"{cell} has {num_bytes} bytes of frames; pictures show at most {_MOST_FRAMES_BYTES}")
    chunks = []
    for place, found in groupby(reader.stored(cell), key=lambda each: each.place):
        name, of_object = reader.object_names[place], list(found)  # next to each other
        start = of_object[0].start
        if (data := await store.get(name, start, of_object[-1].end - start)) is None:
            raise StoreError("missing", f"{name} is gone")
        chunks += [memoryview(data)[each.start - start : each.end - start] for each in of_object]
    return reader.decode_cell(cell, chunks)


def _thumbnails(reader: SegmentReader, quantised: Quantised) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first frame of each part that has frames, shrunk, with the part's index."""
    for index, (part, integers) in enumerate(zip(reader.manifest.parts, quantised, strict=True)):
        if not part.layout:
            continue
        layout: Layout = reader.layouts[part.layout]
        if layout.is_flat:  # no pictures: draw those that a video would have
            layout = layouts_of(reader.manifest, reader.quantiser, _RESOLUTION)[part.layout]
        # The layout is a bijection, so these are exactly the frames of the integers that the codec decoded.
        yield index, _thumbnail(layout.to_frames(integers).numpy()[0].transpose(1, 2, 0))


def _drawn(manifest: Manifest, rows: Mapping[Cell, Mapping[int, np.ndarray]]) -> Image.Image:
    """Return thumbnails as one picture. All rows have the same parts."""
    columns = list(next(iter(rows.values())))
    labels = [_cell_name(manifest, cell) for cell in rows]
    heads = [manifest.parts[index].name for index in columns]
    heights = [max(thumbnail.shape[0] for thumbnail in row.values()) for row in rows.values()]
    widths = [
        max(_text_width(head), *(row[index].shape[1] for row in rows.values()))
        for head, index in zip(heads, columns, strict=True)
    ]
    lefts = np.cumsum([2 * _MARGIN + max(map(_text_width, labels))] + [w + _MARGIN for w in widths]).tolist()
    tops = np.cumsum([2 * _MARGIN + _TEXT_HEIGHT] + [h + _MARGIN for h in heights]).tolist()
    sheet = Image.new("RGB", (lefts[-1], tops[-1]), (24, 24, 24))
    draw = ImageDraw.Draw(sheet)
    for head, left in zip(heads, lefts, strict=False):
        draw.text((left, _MARGIN), head, font=_FONT)
    for row, label, top in zip(rows.values(), labels, tops, strict=False):
        draw.text((_MARGIN, top), label, font=_FONT)
        for index, left in zip(columns, lefts, strict=False):
            sheet.paste(Image.fromarray(row[index]), (left, top))
    return sheet


def _cell_name(manifest: Manifest, cell: Cell) -> str:
    """Return a cell's name: its layers, and its heads if the segment has several head blocks."""
    grid, first, offset = manifest.grid, manifest.first_head, manifest.namespace.first_layer
    layers, heads = grid.layers(cell.layer_group), grid.heads(cell.head_block)
    name = f"layers {first_to_last(offset + layers.start, offset + layers.stop)}"
    if grid.num_head_blocks == 1:
        return name
    return f"{name} heads {first_to_last(first + heads.start, first + heads.stop)}"


def _text_width(text: str) -> int:
    return int(_FONT.getlength(text)) + 1


def _thumbnail(picture: np.ndarray) -> np.ndarray:
    """Shrink a picture ``(height, width, 3)`` by an integer factor, to sides of at most ``THUMBNAIL_SIDE`` pixels. Each
    plane's values, without the fill value, are stretched: percentiles 1 to 99 cover the range 0 to 255."""
    height, width = picture.shape[:2]
    factor = -(-max(height, width) // THUMBNAIL_SIDE)
    padded = np.pad(picture, ((0, -height % factor), (0, -width % factor), (0, 0)), constant_values=FILL)
    blocks = padded.reshape(padded.shape[0] // factor, factor, padded.shape[1] // factor, factor, 3)
    means: np.ndarray = blocks.mean(axis=(1, 3))
    stretched = np.empty_like(means)
    for plane in range(3):
        values = means[..., plane]
        held = values[values != FILL]
        low, high = np.percentile(held if held.size else values, (1, 99))
        stretched[..., plane] = np.where(values == FILL, FILL, (values - low) * (255 / max(high - low, 1)))
    return stretched.clip(0, 255).astype(np.uint8)
