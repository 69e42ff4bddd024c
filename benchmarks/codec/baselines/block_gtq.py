"""Block-GTQ (arXiv 2606.24033)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, pack, unpack
from benchmarks.codec.baselines.attention import AttentionMethod, AttentionStatistics
from benchmarks.codec.baselines.turboquant import centroids, nearest, norms_of, turned, turned_back, with_norm_1
from benchmarks.codec.method import Shape, from_bytes, to_bytes
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.types import TensorName

_FEWEST_BITS, _MOST_BITS = 1, 8
_SEED = 42


class _Group(NamedTuple):
    """The channels of one head that have the same number of bits."""

    bits: int
    channels: torch.Tensor
    rotation: torch.Tensor


class BlockGtq(AttentionMethod):
    """Gives each pair of channels that RoPE turns its own number of bits in K.

    A pair's energy is half the sum of the mean squares of its queries and of its keys (section 3). Each bit more
    quarters a pair's error, so bits go one by one to the pair with the largest energy times ``4^-bits``, from 1 to 8
    bits, until a head has its budget (algorithm 1). A head's pairs with equal bits form a group, which TurboQuant's MSE
    quantiser stores, with a norm of its own in float16. V has TurboQuant's quantiser with equal bits everywhere.

    This follows the authors' code (JIA-Lab-research/blockgtq) with two differences. Bits are packed without gaps, while
    theirs gives more than 4 bits a whole byte. V is turned by a Hadamard matrix with random signs. Keys are coded with
    their rotary embedding, which changes no energy. In the paper's main results no token is exact; there are also rows
    with an exact first token, the sink.
    """

    def __init__(self, k_bits: int, v_bits: int, first_exact: int) -> None:
        super().__init__(first_exact, 0)
        self.name = f"block-gtq-k{k_bits}v{v_bits}" + ("+sink" if first_exact else "")
        self.family = "Block-GTQ" + (" + exact sink" if first_exact else "")
        sink = "; the first token exact" if first_exact else ""
        self.source = f"Block-GTQ (arXiv 2606.24033, 3), {k_bits} bits for K and {v_bits} for V on average{sink}"
        self._k_bits, self._v_bits = k_bits, v_bits

    def prepare(self, statistics: AttentionStatistics) -> None:
        energies = (statistics.queries.diagonal(dim1=-2, dim2=-1) + statistics.keys) / 2
        pairs = rope_pairs(statistics.rope, energies.shape[-1])
        self._groups = [
            [_groups(allocate(head[pairs].sum(1), self._k_bits * len(pairs)), pairs) for head in layer]
            for layer in energies
        ]

    def encode_rest(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        if tensor == "v":
            norms, directions = norms_of(values)
            yield _packed(turned(directions, 0), self._v_bits)
            yield to_bytes(norms)
            return
        for layer, heads in enumerate(self._groups):
            for head, groups in enumerate(heads):
                for group in groups:
                    norms, directions = norms_of(values[:, layer, head, group.channels])
                    yield _packed(directions @ group.rotation, group.bits)
                    yield to_bytes(norms)

    def decode_rest(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        if tensor == "v":
            directions = turned_back(_unpacked(next(parts), self._v_bits, shape), 0)
            return directions * from_bytes(next(parts), META_DTYPE, (*shape[:-1], 1)).float()
        values = torch.empty(shape)
        for layer, heads in enumerate(self._groups):
            for head, groups in enumerate(heads):
                for group in groups:
                    directions = _unpacked(next(parts), group.bits, (shape[0], len(group.channels)))
                    norms = from_bytes(next(parts), META_DTYPE, (shape[0], 1)).float()
                    values[:, layer, head, group.channels] = directions @ group.rotation.T * norms
        return values


def block_gtq_methods() -> list[BlockGtq]:
    return [BlockGtq(k, v, first) for first in (0, 1) for k, v in ((4, 4), (3, 3), (3, 2), (2, 2))]


def allocate(energies: torch.Tensor, budget: int) -> torch.Tensor:
    """Return the number of bits of each pair, ``(pairs,)``. They sum to the budget and minimise the sum of energy times
    4^-bits."""
    bits = torch.full((len(energies),), _FEWEST_BITS)
    for _ in range(min(budget, _MOST_BITS * len(bits)) - int(bits.sum())):
        gains = torch.where(bits < _MOST_BITS, energies.double() * 4.0 ** -bits.double(), -1.0)
        bits[gains.argmax()] += 1
    return bits


def rope_pairs(rope: Rope, dim: int) -> torch.Tensor:
    """Return the channels that are turned together, ``(dim / 2, 2)``. Channels without rotation form pairs, too."""
    rotary = torch.arange(rope.rotary_dim)
    pairs = rotary.view(-1, 2) if rope.interleaved else rotary.view(2, -1).T
    return torch.cat((pairs, torch.arange(rope.rotary_dim, dim).view(-1, 2)))


def _groups(bits: torch.Tensor, pairs: torch.Tensor) -> list[_Group]:
    found = []
    for width in sorted(set(bits.tolist())):
        channels = pairs[bits == width].flatten()
        random = torch.randn(len(channels), len(channels), generator=torch.Generator().manual_seed(_SEED + width))
        found.append(_Group(width, channels, torch.linalg.qr(random)[0]))
    return found


def _packed(directions: torch.Tensor, bits: int) -> bytes:
    return to_bytes(pack(nearest(directions * math.sqrt(directions.shape[-1]), centroids(bits)), bits))


def _unpacked(data: bytes, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    integers = unpack(from_bytes(data, torch.uint8, (-1,)), bits, math.prod(shape)).view(*shape)
    return with_norm_1(centroids(bits)[integers.long()])
