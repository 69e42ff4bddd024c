"""The interface of quantisers, which convert the KV values of a cell into coded parts and back, and the simplest one,
`exact`, which loses nothing: it stores the bytes of values as separate planes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sgl_kvfetch import blocks
from sgl_kvfetch.codec.bitstream.base import Wide
from sgl_kvfetch.codec.layout.frames import Layout, tile_layout
from sgl_kvfetch.codec.quant import _exact
from sgl_kvfetch.codec.quant.rope import Rotations
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import TENSORS, KVGeometry, torch_dtype

if TYPE_CHECKING:
    from sgl_kvfetch.codec.quant.klt import KltForward
    from sgl_kvfetch.codec.quant.profile import Profile

# The parts of a cell, as bytes or as integers: see `Part`.
Quantised = tuple[torch.Tensor, ...]

# What sums in another order change, units in the last place, root mean square: those of half types are in float32, and
# differ where they are rounded; those of float32 add up over all layers.
_SUMS_NOISE = {torch.float32: 16.0}
_SUMS_NOISE_OF_OTHERS = 2.0
VALUE_LAYERS = 3  # layers of a cell that is laid out in tiles: one per colour plane


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cell. Each part is coded, checksummed and decoded separately.

    ``layout``: the name of the frame layout of its uint8 integers, which a video codec may code. If None, the part is
    uint8 bytes ``(n,)``, token after token, for a general-purpose codec. The parts of a longer span are those of its
    pieces, joined along ``token_dim``.
    """

    name: str
    layout: str | None = None
    token_dim: int = 0


class CellValues(NamedTuple):
    """K and V, usually of a cell: ``(tokens, layers, heads, dim)`` each."""

    k: torch.Tensor
    v: torch.Tensor

    def tokens(self, which: slice) -> CellValues:
        return CellValues(self.k[which], self.v[which])

    def cell(self, layers: range, heads: range) -> CellValues:
        """Return a view of some layers and heads, counted from the first ones in these values."""
        return CellValues(*(x[:, layers.start : layers.stop, heads.start : heads.stop] for x in self))


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The position of a cell: layers and heads of the model, tokens of the sequence."""

    layers: range
    heads: range
    tokens: range


@dataclass(frozen=True, slots=True)
class TransformInverse:
    """Inverts `klt`: integers are coefficients. Channels are ordered by tensor (K, then V), layer, head and dim."""

    matrix: torch.Tensor  # bfloat16 (coefficients, channels)
    mean: torch.Tensor  # float32 (channels,)
    rotations: Rotations | None  # of the model's layers, applied to K last; None if K is not rotated
    turns: tuple[int, ...]  # for each layer of the cell, the number of its rotation
    step: float  # of a coefficient, in units of the token's scale

    def to(self, device: torch.device) -> TransformInverse:
        return replace(self, matrix=self.matrix.to(device), mean=self.mean.to(device))


class Quantiser(ABC):
    """Maps the KV values of a cell, on the host, to 8-bit integers and back. Stateless."""

    # Name and parameters, as recorded in the namespace. Equal identities can restore each other's integers.
    identity: str
    # Whether every bit is restored, so that what is stored is nearly as large as the values.
    is_lossless = False

    @abstractmethod
    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the parts of a cell of values of ``dtype``, in storage order."""

    @abstractmethod
    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        """Return the parts of a cell. Raises QuantiseError for values that the quantiser cannot represent."""

    def quantise_pieces(self, pieces: Sequence[CellValues], place: CellPlace) -> Quantised:
        """Return the parts of a cell whose tokens are in several tensors, one after another. Raises as `quantise`."""
        return self.quantise(
            pieces[0] if len(pieces) == 1 else CellValues(*map(torch.cat, zip(*pieces, strict=True))), place
        )

    @abstractmethod
    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        """Return the values of a cell, or of some of its tokens, up to rounding. ``place`` is the whole cell's."""

    def restore_pages(self, quantised: Quantised, pages: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        """Write a cell's values to ``pages``, if the quantiser `is_lossless`: K and V of its layers and heads, each
        ``(pages, page_size, layers, heads, dim)``, dim contiguous. ``places``: which one each page is; -1 for none."""
        raise AssertionError(f"{self.identity} restores values by tokens")

    def error_ratios(
        self, computed: CellValues, restored: CellValues, place: CellPlace, coarser: float = 1.0
    ) -> torch.Tensor:
        """Return how many times larger the squared errors of ``restored`` are than this quantiser's should be: float32
        ``(2, layers, tokens)``, of K and of V. ``computed``: the same values as a model computes them, perhaps with
        sums in another order. ``coarser``: how many times as large steps may be."""
        again = self.dequantise(self.quantise(computed, place), computed.k.dtype, place)
        return _ratios(computed, restored, again, computed, coarser**2)

    def repeat_ratios(self, computed: CellValues, restored: CellValues, place: CellPlace) -> torch.Tensor:
        """Return how much ``restored`` differs from what this quantiser makes of ``computed`` now; its own errors are
        1. So this shows faults that are small beside the values, but not beside what a coarse step leaves of them. Of
        the same values, two roundings differ by 2 at most. Where other layers of their cell differ, what is made of
        them now may be as far from ``computed``; what is stored is no fault if it is nearer, and the lesser of both
        distances counts."""
        again = self.dequantise(self.quantise(computed, place), computed.k.dtype, place)
        return torch.minimum(*(_ratios(x, restored, again, computed, 1.0) for x in (again, computed)))

    def require_sound(  # noqa: B027, may be all
        self, plain: Sequence[np.ndarray], shape: tuple[int, int, int], token_bytes: int
    ) -> None:
        """Raise FormatError unless a cell's parts of plain bytes fit the cell, and each other.

        ``plain``: those parts, uint8. ``shape``: the cell's tokens, layers and heads. ``token_bytes``: size of a
        token's values in this cell.
        """

    def some_tokens(self, parts: Quantised, tokens: slice) -> Quantised:
        """Return the parts of some tokens of a cell."""
        raise NotImplementedError(f"{self.identity} quantises on the host only")

    def split_cells(
        self, rows: torch.Tensor, exact: torch.Tensor, sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Quantised]:
        """Return each cell's parts of what a GPU has quantised. ``rows``, ``exact``: uint8 ``(rows, tokens)`` and
        ``(bytes,)``, of all cells, as `messages.Write` has them. ``sizes``: rows and bytes of each cell."""
        raise AssertionError(f"no kernel quantises {self.identity}")

    profile: Profile | None = None  # of the model that it was calibrated for
    # What a GPU can do with its cells: restore (`restore_exact`, or `restore_klt` with what `inverse_of` returns), and
    # quantise (`quantise_klt`, with what `forward` returns).
    gpu_restores: bool = False
    gpu_quantises: bool = False

    def inverse_of(self, place: CellPlace) -> TransformInverse:
        """Return the parameters of ``dequantise`` for these layers and heads, with which a kernel restores a cell."""
        raise AssertionError(f"no kernel restores {self.identity}")

    def forward(self, place: CellPlace) -> KltForward:
        """Return the tensors, on the host, with which kernels quantise a cell."""
        raise AssertionError(f"no kernel quantises {self.identity}")

    def coarseness_within(self, max_kl: float, key: str) -> int:
        """Return how many times the step may be tripled if values may cost ``max_kl`` nats per token. Raises
        ConfigError if that is never, naming the config's ``key``."""
        raise ConfigError(f"{key} is for klt: the cost of {self.identity} is not known")

    splits_heads: bool = True  # whether a head's integers are the same, whatever other heads its cell has
    knows_cells: bool = True  # whether the following three are known

    @property
    def cell_layers(self) -> int:
        """Layers of a cell; the last cell of a model may have fewer."""
        return VALUE_LAYERS

    @property
    def cell_heads(self) -> int | None:
        """Heads of a cell, or None if cells of any number of heads can be restored."""
        return None

    def heads_of_a_cell(self, num_heads: int, wanted: int | None) -> int:
        """Return how many of a rank's ``num_heads`` heads a cell has. ``wanted``: how many there should be if the
        quantiser leaves that open, a divisor of them; None for all."""
        if self.cell_heads is not None:
            return self.cell_heads
        return wanted or num_heads if self.splits_heads else num_heads

    def num_coefficients(self, place: CellPlace) -> int | None:
        """Return the number of coefficients of a token in this cell, or None if there is one integer a value."""
        return None

    def wide_coefficients(self, place: CellPlace) -> Sequence[Wide]:
        """Return the coefficients of a token in this cell that have two integers, by row."""
        return ()

    def layouts(
        self, geometry: KVGeometry, cell_heads: int, most_coefficients: int | None, span_tokens: int, resolution: str
    ) -> dict[str, Layout]:
        """Return the best layouts of the integers, by layout name, for spans of up to ``span_tokens`` tokens.

        ``resolution``: a name in ``RESOLUTIONS``, or ``FLAT``.
        """
        named = {part.layout for part in self.parts(torch_dtype(geometry.dtype))}
        return {
            t: tile_layout(cell_heads, geometry.head_dim(t), span_tokens, resolution) for t in TENSORS if t in named
        }


def sums_noise(dtype: torch.dtype) -> float:
    """Return what sums in another order may change, as a share of values' squares."""
    return (_SUMS_NOISE.get(dtype, _SUMS_NOISE_OF_OTHERS) * torch.finfo(dtype).eps) ** 2


def ratio(found: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return ``found / usual``, infinite for what is not finite, and 0 where nothing was found."""
    divided = torch.where(found == 0, 0.0, found / usual)
    return torch.where(divided.isfinite(), divided, math.inf)


def _ratios(
    expected: CellValues, restored: CellValues, again: CellValues, computed: CellValues, allowed: float
) -> torch.Tensor:
    """Return the squares of the differences of ``restored`` from ``expected``, as multiples of those of ``again`` from
    ``computed`` times ``allowed``, and of what sums in another order change."""
    found = []
    for x, y, z, own in zip(expected, restored, again, computed, strict=True):
        usual = allowed * _squares(own, z) + sums_noise(own.dtype) * _squares(own)
        found.append(ratio(_squares(x, y), usual.mean(1, keepdim=True)))
    return torch.stack(found)


def _squares(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sums of the squares of ``x``, or of its difference from ``y``, ``(layers, tokens)``."""
    difference = x.float() if y is None else x.float() - y.float()
    return difference.square().sum((2, 3)).T


def join_parts(parts: Sequence[Part], pieces: Sequence[Quantised]) -> Quantised:
    """Join the parts of consecutive pieces of a span into the parts of the span."""
    return tuple(
        torch.cat(each, dim=part.token_dim) for part, each in zip(parts, zip(*pieces, strict=True), strict=True)
    )


class ExactQuantiser(Quantiser):
    """Rotates each value's bits left by one, then splits it into its bytes, least significant first.

    A float's sign is noise and its first bit. The rotation moves it to the end, so that the last plane is the exponent
    (all of it for bfloat16 and float32), which varies little and compresses well. The low mantissa bytes are noise and
    do not compress. Byte planes, unlike interleaved bytes, show a codec each kind of byte separately.
    """

    identity = "exact"
    is_lossless = True
    gpu_restores = True

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return tuple(Part(f"{t} byte {i}", t) for t in TENSORS for i in range(dtype.itemsize))

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        return self.quantise_pieces([values], place)

    def quantise_pieces(self, pieces: Sequence[CellValues], place: CellPlace) -> Quantised:
        return tuple(plane for tensor in zip(*pieces, strict=True) for plane in to_planes(*tensor))

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        size = dtype.itemsize
        assert len(quantised) == len(TENSORS) * size
        k, v = ((plane[tokens] for plane in quantised[i : i + size]) for i in (0, size))
        return CellValues(from_planes(k, dtype), from_planes(v, dtype))

    def restore_pages(self, quantised: Quantised, pages: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        size, where = len(quantised) // len(TENSORS), np.array(places, dtype=np.int64)
        for number, into in enumerate(pages):
            planes = [plane.contiguous().numpy().data for plane in quantised[number * size : (number + 1) * size]]
            _exact.join(planes, into.view(torch.uint8).numpy().data, where.data)


def to_planes(*pieces: torch.Tensor) -> list[torch.Tensor]:
    """Return the bytes of values whose bits are rotated left by one, uint8, least significant first: a plane for each
    byte. ``pieces``: on the host; they follow each other in their first dimension. Each of them is read once, and
    nothing else is copied. Each plane has memory of its own: one may be sent as it is, when the others are gone.
    """
    shape = sum(map(len, pieces)), *pieces[0].shape[1:]
    planes = [blocks.empty(shape) for _ in range(pieces[0].dtype.itemsize)]
    views = [plane.numpy().data for plane in planes]
    first = 0
    for piece in pieces:
        aligned = piece if piece.stride(-1) == 1 else piece.contiguous()
        _exact.split(aligned.detach().view(torch.uint8).numpy().data, views, first)
        first += piece.numel()
    return planes


def from_planes(planes: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the values that ``to_planes`` split."""
    whole = [plane.contiguous() for plane in planes]
    values = torch.empty(whole[0].shape, dtype=dtype)
    if values.numel():  # as one page
        page = values.view(torch.uint8).flatten()[None].numpy().data
        _exact.join([plane.numpy().data for plane in whole], page, bytes(8))
    return values
