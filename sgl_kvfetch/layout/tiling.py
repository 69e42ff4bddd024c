"""A layout apart from how long its spans are and how large its pictures: what a search finds and a profile keeps."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.layout.choose import RESOLUTIONS, picture_side
from sgl_kvfetch.layout.frames import MIN_PICTURE, FrameLayout, InterFrame

_Count = Annotated[int, Meta(ge=1, le=1 << 16)]


class Tiling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How values stand in a tile, and tiles in frames; see ``FrameLayout`` for the words.

    ``token_rows x token_cols`` is the largest block of tokens at each value's place; short spans and small pictures
    take a smaller one. ``frame_tokens`` bounds the tokens of a frame, so that a span fills more frames (a *group* of
    them, KVFetcher, section 3.2.1); None is as many as the picture holds.
    """

    head_rows: _Count
    head_cols: _Count
    dim_rows: _Count
    dim_cols: _Count
    token_rows: _Count = 1
    token_cols: _Count = 1
    inter_frame: InterFrame = "sliced"
    frame_tokens: _Count | None = None

    def __str__(self) -> str:
        text = f"heads {self.head_rows}x{self.head_cols}, dims {self.dim_rows}x{self.dim_cols}"
        if self.token_rows * self.token_cols > 1:
            text += f", tokens {self.token_rows}x{self.token_cols}"
        text += f", {self.inter_frame}"
        return text if self.frame_tokens is None else f"{text}, {self.frame_tokens} a frame"


def layout_of(tiling: Tiling, span_tokens: int, resolution: str = "240p") -> FrameLayout:
    """The tiling's layout for spans of up to ``span_tokens`` tokens, at no more than the resolution's nominal size.

    The block of tokens is halved until its tile fits the picture, and as long as half of it holds the span (or
    ``frame_tokens``). As in ``default_layout``, the picture is a whole number of tiles and no taller than a full span
    needs; where a tile of one token is larger than the resolution, or less than the decoder's minimum remains, the
    picture grows or is padded, and ``frame_tokens`` may be exceeded by what fits the smallest picture.
    """
    nominal_width, nominal_height = RESOLUTIONS[resolution]
    value_width, value_height = tiling.head_cols * tiling.dim_cols, tiling.head_rows * tiling.dim_rows
    token_rows = _halved(tiling.token_rows, nominal_height // value_height)
    token_cols = _halved(tiling.token_cols, nominal_width // value_width)
    most = min(span_tokens, tiling.frame_tokens or span_tokens)
    token_rows, token_cols = _cut_to(most, token_rows, token_cols)

    tile_width, tile_height = value_width * token_cols, value_height * token_rows
    block = token_rows * token_cols
    num_tiles = -(-span_tokens // block)
    most_tiles = min(num_tiles, max(1, tiling.frame_tokens // block)) if tiling.frame_tokens else num_tiles
    tile_cols = max(1, nominal_width // tile_width)
    # Few tiles: no wider than it takes for them to fill the smallest height.
    tile_cols = min(tile_cols, -(-most_tiles // max(1, MIN_PICTURE // tile_height)))
    most_tiles = min(most_tiles, tile_cols * max(1, nominal_height // tile_height))
    # As many frames as the largest picture needs, in pictures just large enough for that many.
    num_frames = -(-num_tiles // most_tiles)
    tile_rows = -(-num_tiles // (num_frames * tile_cols))
    return FrameLayout(
        width=picture_side(tile_cols * tile_width),
        height=picture_side(tile_rows * tile_height),
        head_rows=tiling.head_rows,
        head_cols=tiling.head_cols,
        dim_rows=tiling.dim_rows,
        dim_cols=tiling.dim_cols,
        token_rows=token_rows,
        token_cols=token_cols,
        inter_frame=tiling.inter_frame,
    )


def _halved(side: int, most: int) -> int:
    while side > 1 and side > most:
        side = -(-side // 2)
    return side


def _cut_to(num_tokens: int, rows: int, cols: int) -> tuple[int, int]:
    """The block with its columns, then its rows, halved as long as what is left holds ``num_tokens``.

    Halved, and not cut to size: blocks whose sides are powers of two meet the encoder's units. Columns first: of two
    coefficients in one unit, those side by side are more alike than those one above the other.
    """
    while rows * cols > 1:
        halved = (rows, -(-cols // 2)) if cols > 1 else (-(-rows // 2), cols)
        if halved[0] * halved[1] < num_tokens:
            break
        rows, cols = halved
    return rows, cols
