"""Draws a segment's frames as PNG files. Importing this module loads torch, codecs and Pillow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sgl_kvfetch.codec import Cell, Layout, Manifest, Quantised, SegmentReader, layouts_of, quantiser_from_identity
from sgl_kvfetch.codec.layout.frames import FILL
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores.upkeep import Objects
from sgl_kvfetch.types import first_to_last

THUMBNAIL_SIDE = 432  # pixels, at most
MAX_SHEET_ROWS = 24
_MOST_FRAMES_BYTES = 64 << 20  # of a cell: drawing takes three times as much, and a few bytes may decode to gigabytes
_RESOLUTION = "240p"
_MARGIN = 12
_TEXT_HEIGHT = 15
_FONT = ImageFont.load_default(size=_TEXT_HEIGHT)


async def draw_span(
    objects: Objects, manifest: Manifest, directory: Path, span: int, max_frames: int
) -> AsyncIterator[str]:
    """Decode one span cell by cell and write its pictures. Yield a line about each part and about the contact sheet.

    Raises ConfigError, also if a cell has more than 64 MiB of frames, and StoreError if the data cannot be read.
    """
    if span >= manifest.num_spans:
        raise ConfigError(f"--span {span}: the segment has {manifest.num_spans}, counted from 0")
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    writer = PictureWriter(directory, reader, max_frames)
    for cell in manifest.span_cells(span):
        if (num_bytes := reader.frames_bytes(cell)) > _MOST_FRAMES_BYTES:
            raise ConfigError(f"{cell} has {num_bytes} bytes of frames; pictures show at most {_MOST_FRAMES_BYTES}")
        chunks = []
        for level, found in groupby(reader.stored(cell), key=lambda each: each.level):
            name, of_object = reader.object_names[level], list(found)  # next to each other
            start = of_object[0].start
            if (data := await objects.get(name, start, of_object[-1].end - start)) is None:
                raise StoreError("missing", f"{name} is gone")
            chunks += [memoryview(data)[each.start - start : each.end - start] for each in of_object]
        for line in writer.write_cell(cell, reader.decode_cell(cell, chunks)):
            yield line
    yield f"contact sheet: {writer.write_contact_sheet()}"


class PictureWriter:
    """Writes the pictures of one span's cells, and their contact sheet.

    Each frame gives two pictures: ``.planes.png`` shows its three colour planes side by side in grey, ``.rgb.png``
    shows them as red, green and blue. If the three planes look alike, the second picture is grey too. The contact sheet
    has the first frame of each chunk: one row per cell, one column per part. There the contrast is stretched, because
    some planes use few values.
    """

    def __init__(self, directory: Path, reader: SegmentReader, max_frames: int) -> None:
        """Make the directory. Raises ConfigError on failure."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"cannot make {directory}: {e.strerror or e}") from e
        self._directory = directory
        self._reader = reader
        self._manifest = reader.manifest
        self._max_frames = max_frames
        self._thumbnails: dict[tuple[Cell, int], np.ndarray] = {}
        self._span = 0

    def write_cell(self, cell: Cell, quantised: Quantised) -> list[str]:
        """Write a cell's pictures. Return one line about them for each part that is stored as frames."""
        lines = []
        self._span = cell.span
        for index, (part, integers) in enumerate(zip(self._manifest.parts, quantised, strict=True)):
            if not part.layout:
                continue
            layout: Layout = self._reader.variant.layouts[part.layout]
            if layout.is_flat:  # no pictures: draw those that a video would have
                layout = layouts_of(self._manifest, self._reader.quantiser, _RESOLUTION)[part.layout]
            # The layout is a bijection, so these are exactly the frames of the integers that the codec decoded.
            frames = layout.to_frames(integers).numpy()
            if self._manifest.cell_index(cell._replace(span=0)) < MAX_SHEET_ROWS:
                self._thumbnails[cell, index] = _thumbnail(frames[0].transpose(1, 2, 0))
            stem = f"span{cell.span}_{cell_name(self._manifest, cell, '')}_{part.name.replace(' ', '')}"
            count = min(len(frames), self._max_frames)
            for frame_idx, frame in enumerate(frames[:count]):
                planes, rgb = np.concatenate(list(frame), axis=1), frame.transpose(1, 2, 0)
                self._save(f"{stem}_frame{frame_idx:03}.planes.png", Image.fromarray(planes))
                self._save(f"{stem}_frame{frame_idx:03}.rgb.png", Image.fromarray(rgb))
            pattern = self._directory / f"{stem}_frame*.png"
            lines.append(f"{pattern}: {count} of {len(frames)} frames, {layout.width}x{layout.height}")
        return lines

    def write_contact_sheet(self) -> Path:
        """Write the thumbnails as one sheet, a row a cell and a column a part."""
        cells = sorted({cell for cell, _ in self._thumbnails})
        columns = sorted({index for _, index in self._thumbnails})
        labels = [cell_name(self._manifest, cell, " ") for cell in cells]
        heads = [self._manifest.parts[index].name for index in columns]
        heights = [max(self._thumbnails[cell, i].shape[0] for i in columns) for cell in cells]
        widths = [
            max(_text_width(head), *(self._thumbnails[cell, i].shape[1] for cell in cells))
            for head, i in zip(heads, columns, strict=True)
        ]
        lefts = np.cumsum([2 * _MARGIN + max(map(_text_width, labels))] + [w + _MARGIN for w in widths]).tolist()
        tops = np.cumsum([2 * _MARGIN + _TEXT_HEIGHT] + [h + _MARGIN for h in heights]).tolist()
        sheet = Image.new("RGB", (lefts[-1], tops[-1]), (24, 24, 24))
        draw = ImageDraw.Draw(sheet)
        for head, left in zip(heads, lefts, strict=False):
            draw.text((left, _MARGIN), head, font=_FONT)
        for cell, label, top in zip(cells, labels, tops, strict=False):
            draw.text((_MARGIN, top), label, font=_FONT)
            for index, left in zip(columns, lefts, strict=False):
                sheet.paste(Image.fromarray(self._thumbnails[cell, index]), (left, top))
        return self._save(f"span{self._span}_contact-sheet.png", sheet)

    def _save(self, name: str, picture: Image.Image) -> Path:
        path = self._directory / name
        try:
            picture.save(path)
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror or e}") from e
        return path


def cell_name(manifest: Manifest, cell: Cell, separator: str) -> str:
    """Return a cell's name: its layers, and its heads if the segment has several head blocks."""
    grid, first, offset = manifest.grid, manifest.first_head, manifest.namespace.first_layer
    layers = grid.layers(cell.layer_group)
    name = f"layers{separator}{first_to_last(offset + layers.start, offset + layers.stop)}"
    if grid.num_head_blocks == 1:
        return name
    heads = grid.heads(cell.head_block)
    return f"{name}{separator or '_'}heads{separator}{first_to_last(first + heads.start, first + heads.stop)}"


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
