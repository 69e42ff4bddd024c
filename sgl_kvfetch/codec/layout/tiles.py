"""Lay out values in frames: one tile a token, one layer a colour plane.

KVFetcher, section 3.2. *Inter-frame*: the tokens of a span are divided into as many slices as a frame has tiles. Slice
i fills tile i of consecutive frames, one token a frame. So neighbouring tokens have the same position, and the codec
can predict one from the other. *Intra-frame*: a tile holds one token's heads as a grid of rectangles, one a head,
dimensions in row-major order; heads never mix. Layer i of a cell fills colour plane i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvfetch.codec.layout.frames import FILL, FLAT, PLANES, RESOLUTIONS, Dim, Layout, picture_side
from sgl_kvfetch.errors import FormatError

if TYPE_CHECKING:
    import torch


class TileLayout(Layout, frozen=True, kw_only=True, tag="tiles"):
    """Lays out integers ``(tokens, layers, heads, dim)`` of at most three layers.

    A tile is ``head_rows x head_cols`` heads, each ``dim_rows x dim_cols`` values. Token t of T lies in tile ``t // F``
    of frame ``t % F``, F being the number of frames.
    """

    head_rows: Dim
    head_cols: Dim
    dim_rows: Dim
    dim_cols: Dim

    @property
    def tile_width(self) -> int:
        return self.head_cols * self.dim_cols

    @property
    def tile_height(self) -> int:
        return self.head_rows * self.dim_rows

    @property
    def tile_cols(self) -> int:
        return self.width // self.tile_width

    @property
    def tile_rows(self) -> int:
        return self.height // self.tile_height

    @property
    def tokens_per_frame(self) -> int:
        return self.tile_rows * self.tile_cols

    def num_frames(self, shape: tuple[int, ...]) -> int:
        return -(-shape[0] // self.tokens_per_frame)

    def require_fits(self, shape: tuple[int, ...]) -> None:
        super().require_fits(shape)
        _, num_layers, num_heads, head_dim = shape
        if num_layers > PLANES:
            raise FormatError(f"{num_layers} layers, expected at most {PLANES}, one a colour plane")
        if self.head_rows * self.head_cols < num_heads or self.dim_rows * self.dim_cols < head_dim:
            raise FormatError(
                f"tile of {self.head_rows}x{self.head_cols} heads of {self.dim_rows}x{self.dim_cols} values "
                f"cannot hold {num_heads} heads of {head_dim}"
            )
        if self.tile_width > self.width or self.tile_height > self.height:
            raise FormatError(
                f"tile of {self.tile_width}x{self.tile_height} exceeds its picture of {self.width}x{self.height}"
            )

    def to_frames(self, integers: torch.Tensor) -> torch.Tensor:
        shape = tuple(integers.shape)
        self.require_fits(shape)
        num_tokens, num_layers, num_heads, head_dim = shape
        num_frames = self.num_frames(shape)
        if self._are_integers(shape):
            return integers.contiguous().view(num_frames, PLANES, self.height, self.width)
        tile = self.head_rows, self.head_cols, self.dim_rows, self.dim_cols
        num_values = self.head_rows * self.head_cols, self.dim_rows * self.dim_cols
        grid = integers.new_full((self.tokens_per_frame * num_frames, PLANES, *num_values), FILL)
        grid[:num_tokens, :num_layers, :num_heads, :head_dim] = integers
        pixels = grid.view(self.tile_rows, self.tile_cols, num_frames, PLANES, *tile)
        return self._filled_up(pixels.permute(2, 3, 0, 4, 6, 1, 5, 7).flatten(5, 7).flatten(2, 4))

    def _are_integers(self, shape: tuple[int, ...]) -> bool:
        """Return whether frames are the integers in their order, as flat ones of whole cells are."""
        _, num_layers, num_heads, head_dim = shape
        whole = self.tokens_per_frame, self.tile_rows * self.tile_height, self.tile_cols * self.tile_width
        is_whole = whole == (1, self.height, self.width) and self.dim_cols == head_dim and self.head_cols == num_heads
        return self.is_flat and is_whole and num_layers == PLANES

    def from_frames(self, frames: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        assert frames.shape == self.frames_shape(shape), (frames.shape, shape)
        used = frames[:, :, : self.tile_rows * self.tile_height, : self.tile_cols * self.tile_width]
        pixels = used.reshape(
            -1, PLANES, self.tile_rows, self.head_rows, self.dim_rows, self.tile_cols, self.head_cols, self.dim_cols
        )
        grid = pixels.permute(2, 5, 0, 1, 3, 6, 4, 7).reshape(
            -1, PLANES, self.head_rows * self.head_cols, self.dim_rows * self.dim_cols
        )
        return grid[:num_tokens, :num_layers, :num_heads, :head_dim].contiguous()


def tile_layout(num_heads: int, head_dim: int, span_tokens: int, resolution: str = "240p") -> TileLayout:
    """Return a layout for spans of up to ``span_tokens`` tokens at no more than the resolution's nominal size.

    Heads and tiles are as square as their factors allow. The picture is a whole number of tiles, no taller than a full
    span needs to fill all its frames. If one tile exceeds the resolution, the picture grows. If the picture is below
    the decoder's minimum, it is padded. For ``FLAT``, each token has a frame of its own, without padding, of one row a
    layer.
    """
    if resolution == FLAT:
        return TileLayout(
            width=num_heads * head_dim, height=1, head_rows=1, head_cols=num_heads, dim_rows=1, dim_cols=head_dim
        )
    dim_rows, dim_cols = _near_square(head_dim)
    head_rows, head_cols = _near_square(num_heads)
    tile_width, tile_height = head_cols * dim_cols, head_rows * dim_rows
    nominal_width, nominal_height = RESOLUTIONS[resolution]
    tile_cols = max(1, min(nominal_width // tile_width, span_tokens))
    most_tokens = tile_cols * max(1, nominal_height // tile_height)
    # As many frames as the largest picture needs, in pictures just large enough for that many.
    num_frames = -(-span_tokens // most_tokens)
    tile_rows = -(-span_tokens // (num_frames * tile_cols))
    return TileLayout(
        width=picture_side(tile_cols * tile_width),
        height=picture_side(tile_rows * tile_height),
        head_rows=head_rows,
        head_cols=head_cols,
        dim_rows=dim_rows,
        dim_cols=dim_cols,
    )


def _near_square(count: int) -> tuple[int, int]:
    """Return rows and columns with ``rows * cols == count``, as square as its factors allow, not higher than wide."""
    rows = next(r for r in range(int(count**0.5), 0, -1) if count % r == 0)
    return rows, count // rows
