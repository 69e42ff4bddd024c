"""Integers <-> frames: which frame, plane and tile holds which token, layer and head.

KVFetcher, section 3.2. *Inter-frame*: the tokens of a span are cut into as many slices as a frame has places for one;
slice i fills place i, its tokens one after another in consecutive frames, so that neighbours lie at the same place and
the codec can predict one from the other. *Intra-frame*: a tile holds one token's heads as a grid of rectangles, one a
head, dimensions in row-major order; heads never mix. The three layers of a group fill the three colour planes.

Beyond the paper, a tile may hold a block of tokens: each value's pixel becomes a small rectangle, the same value of
each token of the block. Transform coefficients, which vary more from one to the next than from token to token, lie
better so: see ``channel_layout``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from sgl_kvfetch.errors import FormatError

if TYPE_CHECKING:
    import torch

PLANES = 3
FILL = 128  # where a picture holds nothing; constant areas cost next to nothing
MIN_PICTURE = 144  # NVDEC decodes no HEVC picture smaller than 144x144
PICTURE_MULTIPLE = 8  # HEVC's smallest coding unit
MAX_PICTURE_VALUES = 1 << 26

InterFrame = Literal["sliced", "sequential"]

_Dim = Annotated[int, Meta(ge=1, le=1 << 16)]


class FrameLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor's layout, as it is stored in the manifest.

    A tile is ``head_rows x head_cols`` heads, each ``dim_rows x dim_cols`` values, each of them of ``token_rows x
    token_cols`` tokens. The *places* of a frame, one a token, are numbered tile by tile, row by row within a tile's
    block of tokens. ``inter_frame``: "sliced" puts token t of T into place ``t // F`` of frame ``t % F``, F being the
    number of frames; "sequential" fills one frame after the other.
    """

    width: _Dim
    height: _Dim
    head_rows: _Dim
    head_cols: _Dim
    dim_rows: _Dim
    dim_cols: _Dim
    # A factory, for ``omit_defaults`` passes those over: this field is written always.
    inter_frame: InterFrame = msgspec.field(default_factory=lambda: "sliced")
    token_rows: _Dim = 1
    token_cols: _Dim = 1

    @property
    def tile_width(self) -> int:
        return self.head_cols * self.dim_cols * self.token_cols

    @property
    def tile_height(self) -> int:
        return self.head_rows * self.dim_rows * self.token_rows

    @property
    def tile_cols(self) -> int:
        return self.width // self.tile_width

    @property
    def tile_rows(self) -> int:
        return self.height // self.tile_height

    @property
    def tokens_per_tile(self) -> int:
        return self.token_rows * self.token_cols

    @property
    def tokens_per_frame(self) -> int:
        return self.tile_rows * self.tile_cols * self.tokens_per_tile

    def num_frames(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_frame)

    def require_fits(self, num_heads: int, head_dim: int) -> None:
        """Raise FormatError unless a tile holds a token's heads and a picture at least one tile."""
        if self.head_rows * self.head_cols < num_heads or self.dim_rows * self.dim_cols < head_dim:
            raise FormatError(
                f"tile of {self.head_rows}x{self.head_cols} heads of {self.dim_rows}x{self.dim_cols} values "
                f"cannot hold {num_heads} heads of {head_dim}"
            )
        if self.tile_width > self.width or self.tile_height > self.height:
            raise FormatError(
                f"tile of {self.tile_width}x{self.tile_height} exceeds its picture of {self.width}x{self.height}"
            )
        if self.width * self.height > MAX_PICTURE_VALUES:
            raise FormatError(f"picture of {self.width}x{self.height} exceeds {MAX_PICTURE_VALUES} values")

    def to_frames(self, integers: torch.Tensor) -> torch.Tensor:
        """``(tokens, layers <= 3, heads, dim)`` uint8 -> ``(frames, 3, height, width)`` uint8, on the same device."""
        num_tokens, num_layers, num_heads, head_dim = integers.shape
        assert integers.element_size() == 1
        assert 1 <= num_layers <= PLANES
        self.require_fits(num_heads, head_dim)
        num_frames, places = self.num_frames(num_tokens), self.tokens_per_frame

        grid = integers.new_full(
            (num_frames * places, PLANES, self.head_rows * self.head_cols, self.dim_rows * self.dim_cols), FILL
        )
        grid[:num_tokens, :num_layers, :num_heads, :head_dim] = integers
        grid = grid.view(
            *self._token_axes(num_frames),
            PLANES,
            self.head_rows,
            self.head_cols,
            self.dim_rows,
            self.dim_cols,
        )
        pixels = grid.permute(*_TO_FRAMES[self.inter_frame]).reshape(
            num_frames, PLANES, self.tile_rows * self.tile_height, self.tile_cols * self.tile_width
        )
        frames = integers.new_full((num_frames, PLANES, self.height, self.width), FILL)
        frames[:, :, : pixels.shape[2], : pixels.shape[3]] = pixels
        return frames

    def from_frames(
        self, frames: torch.Tensor, num_tokens: int, num_layers: int, num_heads: int, head_dim: int
    ) -> torch.Tensor:
        """The inverse: ``(frames, 3, height, width)`` -> ``(tokens, layers, heads, dim)``, contiguous uint8."""
        num_frames = self.num_frames(num_tokens)
        assert frames.shape == (num_frames, PLANES, self.height, self.width), frames.shape
        used = frames[:, :, : self.tile_rows * self.tile_height, : self.tile_cols * self.tile_width]
        pixels = used.reshape(
            num_frames,
            PLANES,
            self.tile_rows,
            self.head_rows,
            self.dim_rows,
            self.token_rows,
            self.tile_cols,
            self.head_cols,
            self.dim_cols,
            self.token_cols,
        )
        grid = pixels.permute(*_FROM_FRAMES[self.inter_frame]).reshape(
            num_frames * self.tokens_per_frame,
            PLANES,
            self.head_rows * self.head_cols,
            self.dim_rows * self.dim_cols,
        )
        return grid[:num_tokens, :num_layers, :num_heads, :head_dim].contiguous()

    def _token_axes(self, num_frames: int) -> tuple[int, ...]:
        places = (self.tile_rows, self.tile_cols, self.token_rows, self.token_cols)
        return (*places, num_frames) if self.inter_frame == "sliced" else (num_frames, *places)


# Grid axes: five of the token (see ``_token_axes``), plane, head_row, head_col, dim_row, dim_col.
# Frame axes: frame, plane, tile_row, head_row, dim_row, token_row, tile_col, head_col, dim_col, token_col.
_TO_FRAMES: dict[InterFrame, tuple[int, ...]] = {
    "sliced": (4, 5, 0, 6, 8, 2, 1, 7, 9, 3),
    "sequential": (0, 5, 1, 6, 8, 3, 2, 7, 9, 4),
}
_FROM_FRAMES: dict[InterFrame, tuple[int, ...]] = {
    "sliced": (2, 6, 5, 9, 0, 1, 3, 7, 4, 8),
    "sequential": (0, 2, 6, 5, 9, 1, 3, 7, 4, 8),
}
