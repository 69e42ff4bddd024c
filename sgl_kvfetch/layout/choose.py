"""Choose a layout when nobody measured one: near-square heads and tiles, pictures without waste."""

from __future__ import annotations

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
        width=_picture_side(tile_cols * tile_width),
        height=_picture_side(tile_rows * tile_height),
        head_rows=head_rows,
        head_cols=head_cols,
        dim_rows=dim_rows,
        dim_cols=dim_cols,
        inter_frame=inter_frame,
    )


def _near_square(count: int) -> tuple[int, int]:
    """Rows and columns with ``rows * cols == count``, as square as its factors allow, not higher than wide."""
    rows = next(r for r in range(int(count**0.5), 0, -1) if count % r == 0)
    return rows, count // rows


def _picture_side(used: int) -> int:
    side = max(used, MIN_PICTURE)
    return -(-side // PICTURE_MULTIPLE) * PICTURE_MULTIPLE
