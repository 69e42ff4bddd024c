"""Choose a layout when nobody measured one: near-square heads, tiles and token blocks, pictures without waste."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import log2

from sgl_kvfetch.layout.frames import MIN_PICTURE, PICTURE_MULTIPLE, FrameLayout, InterFrame

RESOLUTIONS: dict[str, tuple[int, int]] = {  # nominal width and height, as in KVFetcher's tables
    "240p": (432, 240),
    "480p": (856, 480),
    "640p": (1136, 640),
    "1080p": (1920, 1080),
}


def default_layout(
    num_heads: int,
    head_dim: int,
    span_tokens: int,
    resolution: str = "240p",
    inter_frame: InterFrame = "sliced",
) -> FrameLayout:
    """A layout for spans of up to ``span_tokens`` tokens at no more than the resolution's nominal size.

    The picture is a whole number of tiles, and no taller than a full span needs to fill all its frames; where a tile
    alone is larger than the resolution, or less than the decoder's minimum remains, the picture grows or is padded.
    """
    dim_rows, dim_cols = _near_square(head_dim)
    head_rows, head_cols = _near_square(num_heads)
    tile_width, tile_height = head_cols * dim_cols, head_rows * dim_rows
    nominal_width, nominal_height = RESOLUTIONS[resolution]
    tile_cols = max(1, min(nominal_width // tile_width, span_tokens))
    most_tokens = tile_cols * max(1, nominal_height // tile_height)
    # As many frames as the largest picture needs, in pictures just large enough for that many.
    num_frames = -(-span_tokens // most_tokens)
    tile_rows = -(-span_tokens // (num_frames * tile_cols))
    return FrameLayout(
        width=picture_side(tile_cols * tile_width),
        height=picture_side(tile_rows * tile_height),
        head_rows=head_rows,
        head_cols=head_cols,
        dim_rows=dim_rows,
        dim_cols=dim_cols,
        inter_frame=inter_frame,
    )


@lru_cache(maxsize=256)
def channel_layout(num_heads: int, head_dim: int, span_tokens: int, resolution: str = "240p") -> FrameLayout:
    """A channel-major layout, for transform coefficients in spans of up to ``span_tokens`` tokens.

    A frame is one tile of consecutive tokens: each coefficient has a block of them to itself, and the blocks lie side
    by side in row-major order of (head, dim), which is that of falling variance, so that neighbours are much alike.
    Pictures stay within the resolution's nominal size unless not even one token fits, and are no larger than a full
    span needs, the decoder's minimum apart.
    """
    return min(_channel_candidates(num_heads, head_dim, span_tokens, resolution), key=lambda c: c[0])[1]


# What each fault of a channel-major layout costs, roughly, as a part of the bitstream. The encoder codes a picture in
# units of up to 32x32. Coefficients side by side in a unit are next in order, those one below the other a whole row of
# blocks apart, so that block edges should be unit edges there: how high a block is matters, how wide hardly does.
_UNIT = 32
_COST_OFF_UNIT = 0.035
_COST_OF_HALF_UNIT = 0.02
_COST_OF_TWICE_THE_FRAMES = 0.01
_COST_OF_TWICE_THE_ASPECT = 0.002
_COST_OF_TWICE_THE_PIXELS = 0.2  # hardly a bit more; but decoders take as much longer


def _channel_candidates(
    num_heads: int, head_dim: int, span_tokens: int, resolution: str
) -> Iterator[tuple[float, FrameLayout]]:
    """Layouts to choose from, with their costs."""
    most_width, most_height = RESOLUTIONS[resolution]
    most_height = max(most_height, num_heads * -(-head_dim // most_width))
    for dim_cols in range(1, min(head_dim, most_width) + 1):
        dim_rows = -(-head_dim // dim_cols)
        most_token_rows = most_height // (num_heads * dim_rows)
        if not most_token_rows or -(-head_dim // dim_rows) != dim_cols:  # too high, or fewer columns would do
            continue
        for token_cols in range(1, min(most_width // dim_cols, span_tokens) + 1):
            fewest_frames = -(-span_tokens // (token_cols * most_token_rows))
            for token_rows in _token_rows(-(-span_tokens // (fewest_frames * token_cols)), most_token_rows):
                num_frames = -(-span_tokens // (token_rows * token_cols))
                if (token_cols - 1) * token_rows * num_frames >= span_tokens:  # a column would stay empty
                    continue
                layout = FrameLayout(
                    width=picture_side(dim_cols * token_cols),
                    height=picture_side(num_heads * dim_rows * token_rows),
                    head_rows=num_heads,
                    head_cols=1,
                    dim_rows=dim_rows,
                    dim_cols=dim_cols,
                    inter_frame="sequential",
                    token_rows=token_rows,
                    token_cols=token_cols,
                )
                num_values = span_tokens * num_heads * head_dim
                yield _channel_cost(layout, num_frames, num_values), layout


def _token_rows(count: int, most: int) -> set[int]:
    """``count`` and the two nearest that suit the encoder's units, as far as they fit."""
    unit = min(_UNIT, 1 << (count.bit_length() - 1))
    return {rows for rows in (count, count // unit * unit, -(-count // unit) * unit) if rows <= most}


def _channel_cost(layout: FrameLayout, num_frames: int, num_values: int) -> float:
    cost = _COST_OF_HALF_UNIT * max(0.0, log2(_UNIT / layout.token_rows))
    if layout.token_rows % _UNIT and _UNIT % layout.token_rows:
        cost += _COST_OFF_UNIT
    cost += _COST_OF_TWICE_THE_FRAMES * log2(num_frames)
    cost += _COST_OF_TWICE_THE_ASPECT * abs(log2(layout.token_rows / layout.token_cols))
    cost += _COST_OF_TWICE_THE_ASPECT * abs(log2(layout.width / layout.height))
    return cost + _COST_OF_TWICE_THE_PIXELS * log2(num_frames * layout.width * layout.height / num_values)


def _near_square(count: int) -> tuple[int, int]:
    """Rows and columns with ``rows * cols == count``, as square as its factors allow, not higher than wide."""
    rows = next(r for r in range(int(count**0.5), 0, -1) if count % r == 0)
    return rows, count // rows


def picture_side(used: int) -> int:
    """The least side of a picture that holds ``used`` values and that every decoder takes."""
    side = max(used, MIN_PICTURE)
    return -(-side // PICTURE_MULTIPLE) * PICTURE_MULTIPLE
