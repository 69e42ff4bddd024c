"""Lay out transform coefficients in frames: each coefficient has a region of the picture with all tokens of the span.

Coefficients differ more from each other than one coefficient differs between tokens, and a video encoder adapts block
by block. So each coefficient has its own rectangle, as large as the span, and coefficients are ordered by their
variation. Each group of three consecutive ones shares a rectangle, one in each colour plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvfetch.codec.layout.frames import FILL, FLAT, PLANES, RESOLUTIONS, Dim, Layout, picture_side
from sgl_kvfetch.errors import FormatError

if TYPE_CHECKING:
    import torch

# The encoder codes pictures in units of up to 32x32. A region that is no higher shares no unit with those below it.
_UNIT = 32


class RegionLayout(Layout, frozen=True, kw_only=True, tag="regions"):
    """Lays out integers ``(coefficients, tokens)`` of at most ``token_rows * token_cols`` tokens.

    A picture has N regions of ``token_rows x token_cols`` pixels, numbered row by row. Coefficient c lies in plane
    ``c % 3`` of region ``c // 3 % N`` of frame ``c // (3 N)``, and token t at ``(t // token_cols, t % token_cols)`` of
    the region.
    """

    token_rows: Dim
    token_cols: Dim

    @property
    def region_cols(self) -> int:
        return self.width // self.token_cols

    @property
    def region_rows(self) -> int:
        return self.height // self.token_rows

    @property
    def coefficients_per_frame(self) -> int:
        return self.region_rows * self.region_cols * PLANES

    def num_frames(self, shape: tuple[int, ...]) -> int:
        return -(-shape[0] // self.coefficients_per_frame)

    def require_fits(self, shape: tuple[int, ...]) -> None:
        super().require_fits(shape)
        _, num_tokens = shape
        if num_tokens > self.token_rows * self.token_cols:
            raise FormatError(f"region of {self.token_rows}x{self.token_cols} cannot hold {num_tokens} tokens")
        if self.token_cols > self.width or self.token_rows > self.height:
            raise FormatError(
                f"region of {self.token_cols}x{self.token_rows} exceeds its picture of {self.width}x{self.height}"
            )

    def begins_with(self, shape: tuple[int, ...]) -> bool:
        return self.is_flat and self.width == self.token_cols == shape[1]

    def to_frames(self, integers: torch.Tensor) -> torch.Tensor:
        shape = tuple(integers.shape)
        self.require_fits(shape)
        count, num_tokens = shape
        num_frames = self.num_frames(shape)
        grid = integers.new_full((num_frames * self.coefficients_per_frame, self.token_rows * self.token_cols), FILL)
        grid[:count, :num_tokens] = integers
        pixels = grid.view(num_frames, self.region_rows, self.region_cols, PLANES, self.token_rows, self.token_cols)
        return self._filled_up(pixels.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3))

    def from_frames(self, frames: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        count, num_tokens = shape
        assert frames.shape == self.frames_shape(shape), (frames.shape, shape)
        used = frames[:, :, : self.region_rows * self.token_rows, : self.region_cols * self.token_cols]
        pixels = used.reshape(-1, PLANES, self.region_rows, self.token_rows, self.region_cols, self.token_cols)
        grid = pixels.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.token_rows * self.token_cols)
        return grid[:count, :num_tokens].contiguous()


def region_layout(num_coefficients: int, span_tokens: int, resolution: str = "240p") -> RegionLayout:
    """Return a layout for up to ``num_coefficients`` coefficients of spans of up to ``span_tokens`` tokens.

    Regions are squares of 32x32 or a smaller power of two, and wider for longer spans. Pictures stay within the
    resolution's nominal size unless one region is larger. They have no empty rows of regions. For ``FLAT``, a region
    is a row of all tokens, and has a picture of its own.
    """
    if resolution == FLAT:
        return RegionLayout(width=span_tokens, height=1, token_rows=1, token_cols=span_tokens)
    token_rows = min(_UNIT, 1 << ((span_tokens - 1).bit_length() + 1) // 2)
    nominal_width, nominal_height = RESOLUTIONS[resolution]
    while token_rows * nominal_width < span_tokens and token_rows < nominal_height:
        token_rows *= 2  # otherwise a very long span would be wider than the picture
    token_cols = -(-span_tokens // token_rows)
    regions = -(-num_coefficients // PLANES)
    cols = max(1, min(nominal_width // token_cols, regions))
    most_rows = max(1, nominal_height // token_rows)
    num_frames = -(-regions // (cols * most_rows))
    rows = -(-regions // (num_frames * cols))
    return RegionLayout(
        width=picture_side(cols * token_cols),
        height=picture_side(rows * token_rows),
        token_rows=token_rows,
        token_cols=token_cols,
    )
