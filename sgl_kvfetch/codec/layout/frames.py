"""Layouts: how integers lie in frames, as tiles or as regions; and a checksum of frames.

**Tiles** are for values: one tile a token, one layer a colour plane. KVFetcher, section 3.2. *Inter-frame*: the tokens
of a span are divided into as many slices as a frame has tiles. Slice i fills tile i of consecutive frames, one token a
frame. So neighbouring tokens have the same position, and the codec can predict one from the other. *Intra-frame*: a
tile holds one token's heads as a grid of rectangles, one a head, dimensions in row-major order; heads never mix. Layer
i of a cell fills colour plane i.

**Regions** are for transform coefficients: each has a region of the picture with all tokens of the span. Coefficients
differ more from each other than one coefficient differs between tokens, and a video encoder adapts block by block. So
each coefficient has its own rectangle, as large as the span, and coefficients are ordered by their variation. Each
group of three consecutive ones shares a rectangle, one in each colour plane.

**The checksum** is one that CPUs and GPUs compute cheaply: 64 bits, a sum over the frames' 8-byte words. Each word j is
combined with its index and goes through a mixer; the results are added modulo 2^64. The sum does not depend on the
order of addition, so every division of the frames into blocks gives the same bits.

The mixer is SplitMix64's: Stafford's variant 13 of MurmurHash3's finaliser, applied to ``word + (j + 1) * GAMMA`` as in
that generator. It is a permutation of the 64-bit integers, so frames that differ in only one word (one to eight pixels)
never have the same sum. If it were a random permutation for each index, other differing frames would have the same sum
with a probability of at most 1 / (2^64 - 1): the last differing word must compensate for all others, and one of its
values does. The sum is not a secret: it detects errors of decoders and memory, not forgeries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.errors import FormatError

if TYPE_CHECKING:  # a store has neither
    import torch

PLANES = 3
FILL = 128  # of pixels without an integer: constant areas cost almost nothing in every codec
MIN_PICTURE = 144  # NVDEC decodes no HEVC picture smaller than 144x144
PICTURE_MULTIPLE = 8  # HEVC's smallest coding unit
MAX_PICTURE_VALUES = 1 << 22  # of one plane; a decoder keeps up to 17 pictures in memory

RESOLUTIONS: dict[str, tuple[int, int]] = {  # nominal width and height, as in KVFetcher's tables
    "240p": (432, 240),
    "480p": (856, 480),
    "640p": (1136, 640),
    "1080p": (1920, 1080),
}

FLAT = "flat"  # instead of a resolution: rows of integers, for codecs that know no pictures

Dim = Annotated[int, Meta(ge=1, le=1 << 16)]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A bijection between uint8 integers of one shape and frames, uint8 ``(frames, 3, height, width)``.

    Pixels that hold no integer are ``FILL``.
    """

    width: Dim
    height: Dim

    @property
    def is_flat(self) -> bool:
        """Whether frames are rows of integers, and not pictures for a video codec."""
        return self.height == 1

    def require_fits(self, shape: tuple[int, ...]) -> None:
        """Raise FormatError unless the pictures can hold integers of ``shape``."""
        if self.width * self.height > MAX_PICTURE_VALUES:
            raise FormatError(f"picture of {self.width}x{self.height} exceeds {MAX_PICTURE_VALUES} values")

    def num_frames(self, shape: tuple[int, ...]) -> int:
        """Return the number of frames that integers of ``shape`` take."""
        raise NotImplementedError

    def to_frames(self, integers: torch.Tensor) -> torch.Tensor:
        """Return the frames of ``integers``, contiguous, on the same device."""
        raise NotImplementedError

    def from_frames(self, frames: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the integers of ``shape`` that ``frames`` hold, contiguous, on the same device."""
        raise NotImplementedError

    def begins_with(self, shape: tuple[int, ...]) -> bool:
        """Return whether frames, read as bytes, begin with integers of ``shape``, in their order."""
        return False

    def each_begins_with(self, shape: tuple[int, ...]) -> bool:
        """Return whether each frame, read as bytes, begins with the integers of one token, in their order."""
        return False

    def _filled_up(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return whole pictures that begin with ``pixels``, ``(frames, 3, rows, columns)``, contiguous."""
        rows, columns = pixels.shape[2:]
        if (rows, columns) == (self.height, self.width):
            return pixels.contiguous()
        frames = pixels.new_full((*pixels.shape[:2], self.height, self.width), FILL)
        frames[:, :, :rows, :columns] = pixels
        return frames

    def frames_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the shape of the frames that integers of ``shape`` take."""
        return self.num_frames(shape), PLANES, self.height, self.width


def picture_side(used: int) -> int:
    """Return the smallest side of a picture that has room for ``used`` values and is valid for every decoder."""
    side = max(used, MIN_PICTURE)
    return -(-side // PICTURE_MULTIPLE) * PICTURE_MULTIPLE


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
            raise FormatError(f"{num_layers} layers, expected at most {PLANES}, one per colour plane")
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
        if self.begins_with(shape):
            return integers.contiguous().view(num_frames, PLANES, self.height, self.width)
        tile = self.head_rows, self.head_cols, self.dim_rows, self.dim_cols
        num_values = self.head_rows * self.head_cols, self.dim_rows * self.dim_cols
        grid = integers.new_full((self.tokens_per_frame * num_frames, PLANES, *num_values), FILL)
        grid[:num_tokens, :num_layers, :num_heads, :head_dim] = integers
        pixels = grid.view(self.tile_rows, self.tile_cols, num_frames, PLANES, *tile)
        return self._filled_up(pixels.permute(2, 3, 0, 4, 6, 1, 5, 7).flatten(5, 7).flatten(2, 4))

    def begins_with(self, shape: tuple[int, ...]) -> bool:
        return self.each_begins_with(shape) and shape[1] == PLANES

    def each_begins_with(self, shape: tuple[int, ...]) -> bool:
        *_, num_heads, head_dim = shape
        whole = self.tokens_per_frame, self.tile_rows * self.tile_height, self.tile_cols * self.tile_width
        is_whole = whole == (1, self.height, self.width) and self.dim_cols == head_dim and self.head_cols == num_heads
        return self.is_flat and is_whole

    def from_frames(self, frames: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        assert frames.shape == self.frames_shape(shape), (frames.shape, shape)
        if self.each_begins_with(shape):  # nothing but layers to leave out
            return frames.reshape(num_tokens, PLANES, num_heads, head_dim)[:, :num_layers].contiguous()
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
