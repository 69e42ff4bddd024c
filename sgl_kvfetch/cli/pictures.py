"""A segment's frames as PNG files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from sgl_kvfetch.cli.glyphs import draw_text, text_size
from sgl_kvfetch.cli.summary import layer_range, layers_of
from sgl_kvfetch.container.manifest import Cell
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.frames import FILL
from sgl_kvfetch.quant import Quantised

THUMBNAIL_SIDE = 432  # pixels, at most
MAX_SHEET_ROWS = 24
_MARGIN = 12
_TEXT_SCALE = 3


class PictureWriter:
    """Writes the pictures of one span's cells, and collects each chunk's first frame for the contact sheet.

    A frame becomes two pictures: ``.planes.png`` shows its three colour planes side by side in grey, ``.rgb.png`` shows
    them as red, green and blue. Where the three look alike, the latter is grey too.
    """

    def __init__(self, directory: Path, reader: SegmentReader, max_frames: int) -> None:
        """Makes the directory. Raises ConfigError if it cannot."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"cannot make {directory}: {e.strerror or e}") from e
        self._directory = directory
        self._reader = reader
        self._manifest = reader.manifest
        self._max_frames = max_frames
        self._thumbnails: dict[tuple[Cell, int], np.ndarray] = {}

    def write_cell(self, cell: Cell, quantised: Quantised) -> list[str]:
        """Return a line on the pictures of each part that lies in frames."""
        lines = []
        for index, (part, integers) in enumerate(zip(self._manifest.parts, quantised, strict=True)):
            if not part.layout:
                continue
            layout = self._reader.variant.layouts[part.layout]
            # The layout is a bijection: these are the frames that the codec gave.
            frames = layout.to_frames(integers).numpy()
            stem = f"span{cell.span}_{self._name(cell, '')}_{part.name.replace(' ', '')}"
            count = min(len(frames), self._max_frames)
            for frame_idx, frame in enumerate(frames[:count]):
                planes, rgb = np.concatenate(list(frame), axis=1), frame.transpose(1, 2, 0)
                self._save(f"{stem}_frame{frame_idx:03}.planes.png", planes)
                self._save(f"{stem}_frame{frame_idx:03}.rgb.png", rgb)
            if self._manifest.cell_index(cell._replace(span=0)) < MAX_SHEET_ROWS:
                self._thumbnails[cell, index] = _thumbnail(frames[0].transpose(1, 2, 0))
            pattern = self._directory / f"{stem}_frame*.png"
            lines.append(f"{pattern}: {count} of {len(frames)} frames, {layout.width}x{layout.height}")
        return lines

    def write_contact_sheet(self) -> Path:
        """Draw the first frame of each chunk: a row a cell, a column a part.

        Unlike the other pictures, these have their contrast stretched: some planes use few values.
        """
        cells = sorted({cell for cell, _ in self._thumbnails})
        columns = sorted({index for _, index in self._thumbnails})
        labels = [self._name(cell, " ") for cell in cells]
        text_height, label_width = text_size(max(labels, key=len), _TEXT_SCALE)
        heights = [max(self._thumbnails[cell, i].shape[0] for i in columns) for cell in cells]
        heads = [self._manifest.parts[index].name for index in columns]
        widths = [
            max(text_size(head, _TEXT_SCALE)[1], *(self._thumbnails[cell, i].shape[1] for cell in cells))
            for head, i in zip(heads, columns, strict=True)
        ]
        lefts = np.cumsum([2 * _MARGIN + label_width] + [w + _MARGIN for w in widths]).tolist()
        tops = np.cumsum([2 * _MARGIN + text_height] + [h + _MARGIN for h in heights]).tolist()
        sheet = np.full((tops[-1], lefts[-1], 3), 24, np.uint8)
        for head, left in zip(heads, lefts, strict=False):
            draw_text(sheet, head, _MARGIN, left, _TEXT_SCALE)
        for cell, label, top in zip(cells, labels, tops, strict=False):
            draw_text(sheet, label, top, _MARGIN, _TEXT_SCALE)
            for index, left in zip(columns, lefts, strict=False):
                thumbnail = self._thumbnails[cell, index]
                sheet[top : top + thumbnail.shape[0], left : left + thumbnail.shape[1]] = thumbnail
        return self._save(f"span{cells[0].span}_contact-sheet.png", sheet)

    def _name(self, cell: Cell, separator: str) -> str:
        """What to call a cell: its layers, and its heads where there are others."""
        name = f"layers{separator}{layers_of(self._manifest, cell)}"
        grid, first = self._manifest.grid, self._manifest.first_head
        if grid.num_head_blocks == 1:
            return name
        heads = grid.heads(cell.head_block)
        return f"{name}{separator or '_'}heads{separator}{layer_range(first + heads.start, first + heads.stop)}"

    def _save(self, name: str, pixels: np.ndarray) -> Path:
        path = self._directory / name
        try:
            path.write_bytes(encode_png(pixels))
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror or e}") from e
        return path


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8, ``(height, width)`` for grey or ``(height, width, 3)`` for red, green, blue."""
    encoder = av.CodecContext.create("png", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width = pixels.shape[:2]
    encoder.pix_fmt = "gray" if pixels.ndim == 2 else "rgb24"
    encoder.time_base = Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=encoder.pix_fmt)
    return b"".join(map(bytes, [*encoder.encode(frame), *encoder.encode(None)]))


def _thumbnail(picture: np.ndarray) -> np.ndarray:
    """At most ``THUMBNAIL_SIDE`` a side, by a whole factor. In each plane the middle 98% of the values, but for those
    that fill what holds nothing, are stretched over the whole range."""
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
