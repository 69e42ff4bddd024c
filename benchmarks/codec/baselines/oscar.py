"""OSCAR (arXiv 2605.17757)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.baselines.attention import AttentionMethod, AttentionStatistics
from benchmarks.codec.baselines.saw_int4 import hadamard
from benchmarks.codec.method import Shape, from_bytes, to_bytes
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.types import TensorName

_CLIP_RATIOS: dict[TensorName, float] = {"k": 0.96, "v": 0.92}
_FIRST_EXACT, _LAST_EXACT = 64, 256


class Oscar(AttentionMethod):
    """Two bits a value in a basis that attention chooses.

    A layer's keys are turned by the eigenvectors of its queries' second moments, its values by those of its values'
    second moments, where a token counts by its key's mean squared product with the queries (section 3). Both are means
    over heads. A Hadamard matrix then spreads each direction evenly. In this basis each token's head is clipped at a
    quantile of its magnitudes (0.96 for K, 0.92 for V) and stored in uniform steps, with a step and a smallest value.
    The first 64 and last 256 tokens stay in bfloat16.

    This follows the authors' code (FutureMLS-Lab/OSCAR, ``compute_kv_rotation.py`` with ``qqt``, ``sst`` and
    ``r_h_pbr``), with these differences. Step and smallest value are float16, as the paper counts them, while its
    servers use float32. A group is a head, as theirs is at 128 dimensions. So their last permutation, which spreads
    directions over groups, would change nothing, and is left out. Statistics leave out the first 4 tokens. The later
    variant with Lloyd and Max's levels is left out.

    The paper counts 2.28 bits at 128K tokens, where exact tokens are few. At 1,024 they take 5 bits a value; so there
    are rows with only the first 4 tokens exact, and, to have a curve, with 3 and 4 bits, which are not the paper's.
    """

    def __init__(self, bits: int, first_exact: int = _FIRST_EXACT, last_exact: int = _LAST_EXACT) -> None:
        super().__init__(first_exact, last_exact)
        is_papers = (first_exact, last_exact) == (_FIRST_EXACT, _LAST_EXACT)
        self.name = f"oscar-{bits}" + ("" if is_papers else f"/first-{first_exact}")
        self.family = "OSCAR" + ("" if is_papers else f", only {first_exact} tokens exact")
        exact = f"the first {first_exact} and last {last_exact} tokens exact"
        self.source = f"OSCAR (arXiv 2605.17757, 3), {bits} bits, {exact}"
        self._bits = bits

    def prepare(self, statistics: AttentionStatistics) -> None:
        self._rotations: dict[TensorName, torch.Tensor] = {
            "k": _rotations(statistics.queries),
            "v": _rotations(statistics.values),
        }

    def encode_rest(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        turned = values @ self._rotations[tensor]
        levels, meta = to_levels(_clipped(turned, _CLIP_RATIOS[tensor]), self._bits)
        yield to_bytes(pack(levels, self._bits))
        yield to_bytes(meta)

    def decode_rest(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        levels = unpack(from_bytes(next(parts), torch.uint8, (-1,)), self._bits, math.prod(shape)).view(shape)
        turned = from_levels(levels, from_bytes(next(parts), META_DTYPE, (*shape[:-1], 2)))
        return turned @ self._rotations[tensor].mT


def oscar_methods() -> list[Oscar]:
    return [Oscar(2), *(Oscar(bits, 4, 0) for bits in (2, 3, 4))]


def _rotations(moments: torch.Tensor) -> torch.Tensor:
    """Return float32 ``(layers, dim, dim)``. ``moments``: ``(layers, heads, dim, dim)``."""
    dim = moments.shape[-1]
    if dim & (dim - 1):
        raise UnsupportedError(f"oscar: head dimension is {dim}; expected a power of two")
    rotations: torch.Tensor = torch.linalg.eigh(moments.mean(1))[1].float() @ hadamard(dim)
    return rotations


def _clipped(values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Limit each vector to the magnitude below which ``ratio`` of its own values are."""
    dim = values.shape[-1]
    most = values.abs().sort(-1)[0][..., min(int(ratio * dim), dim - 1), None]
    return values.clamp(-most, most)
