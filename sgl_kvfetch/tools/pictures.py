"""Draws a segment's frames as PNG files. Importing this module loads torch, codecs and Pillow.

`kvfetch serve` runs it as a process of its own, which draws one span's contact sheet. Whoever may write to the store
chooses the bytes that are decoded here. So the process has little memory, writes no file, knows no secret and ends with
the server. It prints the sheet as a PNG.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Iterable
from io import BytesIO
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sgl_kvfetch.codec import Cell, Layout, Manifest, Quantised, SegmentReader, layouts_of, quantiser_from_identity
from sgl_kvfetch.codec.layout.frames import FILL
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import ConfigError, KVFetchError, StoreError
from sgl_kvfetch.processes import end_with_parent
from sgl_kvfetch.stores.upkeep import Objects, read_manifest
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
    reader = _reader(manifest, span)
    writer = PictureWriter(directory, reader, max_frames)
    async for cell, quantised in _decoded(objects, reader, manifest.span_cells(span)):
        for line in writer.write_cell(cell, quantised):
            yield line
    yield f"contact sheet: {writer.write_contact_sheet()}"


async def draw_sheet(objects: Objects, manifest: Manifest, span: int) -> bytes:
    """Decode what the contact sheet of a span shows, and return the sheet as a PNG. Raises as `draw_span` does."""
    reader = _reader(manifest, span)
    sheet = ContactSheet(reader)
    async for cell, quantised in _decoded(objects, reader, islice(manifest.span_cells(span), MAX_SHEET_ROWS)):
        sheet.add(cell, quantised)
    png = BytesIO()
    sheet.draw().save(png, format="PNG")
    return png.getvalue()


def _reader(manifest: Manifest, span: int) -> SegmentReader:
    if span >= manifest.num_spans:
        raise ConfigError(f"--span {span}: the segment has {manifest.num_spans}, counted from 0")
    return SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))


async def _decoded(
    objects: Objects, reader: SegmentReader, cells: Iterable[Cell]
) -> AsyncIterator[tuple[Cell, Quantised]]:
    for cell in cells:
        if (num_bytes := reader.frames_bytes(cell)) > _MOST_FRAMES_BYTES:
            raise ConfigError(f"{cell} has {num_bytes} bytes of frames; pictures show at most {_MOST_FRAMES_BYTES}")
        chunks = []
        for level, found in groupby(reader.stored(cell), key=lambda each: each.level):
            name, of_object = reader.object_names[level], list(found)  # next to each other
            start = of_object[0].start
            if (data := await objects.get(name, start, of_object[-1].end - start)) is None:
                raise StoreError("missing", f"{name} is gone")
            chunks += [memoryview(data)[each.start - start : each.end - start] for each in of_object]
        yield cell, reader.decode_cell(cell, chunks)


class ContactSheet:
    """The first frame of each chunk of one span: one row per cell, one column per part.

    Unlike in the other pictures, the contrast is stretched, because some planes use few values.
    """

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._thumbnails: dict[tuple[Cell, int], np.ndarray] = {}

    def add(self, cell: Cell, quantised: Quantised) -> list[tuple[int, Layout, np.ndarray]]:
        """Add a cell, if it is one of the first. Return index, layout and frames of its parts that have frames."""
        drawn = []
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
            drawn.append((index, layout, frames))
        return drawn

    def draw(self) -> Image.Image:
        """Return the thumbnails as one sheet, a row a cell and a column a part."""
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
        return sheet


class PictureWriter:
    """Writes the pictures of one span's cells, and their contact sheet.

    Each frame gives two pictures: ``.planes.png`` shows its three colour planes side by side in grey, ``.rgb.png``
    shows them as red, green and blue. If the three planes look alike, the second picture is grey too.
    """

    def __init__(self, directory: Path, reader: SegmentReader, max_frames: int) -> None:
        """Make the directory. Raises ConfigError on failure."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"cannot make {directory}: {e.strerror or e}") from e
        self._directory = directory
        self._manifest = reader.manifest
        self._max_frames = max_frames
        self._sheet = ContactSheet(reader)
        self._span = 0

    def write_cell(self, cell: Cell, quantised: Quantised) -> list[str]:
        """Write a cell's pictures. Return one line about them for each part that is stored as frames."""
        lines = []
        self._span = cell.span
        for index, layout, frames in self._sheet.add(cell, quantised):
            part = self._manifest.parts[index].name.replace(" ", "")
            stem = f"span{cell.span}_{cell_name(self._manifest, cell, '')}_{part}"
            count = min(len(frames), self._max_frames)
            for frame_idx, frame in enumerate(frames[:count]):
                planes, rgb = np.concatenate(list(frame), axis=1), frame.transpose(1, 2, 0)
                self._save(f"{stem}_frame{frame_idx:03}.planes.png", Image.fromarray(planes))
                self._save(f"{stem}_frame{frame_idx:03}.rgb.png", Image.fromarray(rgb))
            pattern = self._directory / f"{stem}_frame*.png"
            lines.append(f"{pattern}: {count} of {len(frames)} frames, {layout.width}x{layout.height}")
        return lines

    def write_contact_sheet(self) -> Path:
        return self._save(f"span{self._span}_contact-sheet.png", self._sheet.draw())

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


MOST_BYTES = 1 << 30  # beyond what the loaded libraries take


async def _draw(root: Path, manifest_name: str, span: int) -> bytes:
    store = LocalStore(root)
    try:
        manifest = await read_manifest(store, manifest_name)
        if manifest is None:
            raise KVFetchError(f"no segment {manifest_name}")
        return await draw_sheet(store, manifest, span)
    finally:
        await store.close()


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(root: str, manifest_name: str, span: str, parent: str) -> None:
    end_with_parent(int(parent))
    _limit()
    try:
        sys.stdout.buffer.write(asyncio.run(_draw(Path(root), manifest_name, int(span))))
    except KVFetchError as e:
        sys.exit(str(e))
    except MemoryError:
        sys.exit(f"the frames take more than {MOST_BYTES >> 20} MiB of memory")


if __name__ == "__main__":
    main(*sys.argv[1:])
