"""Transform coding with uniform steps: few bits at a given accuracy, by what calibration knows of the model.

A cell is K and V of some heads of some layers. K is turned back by its rotary embedding, both are centred, and all
channels of a token go through the profile's transform (`sgl_kvfetch.calibrate.transform`), after which errors in all
coefficients of all cells cost alike. So they share one step, which a token whose errors cost more than others' divides
by a scale (`sgl_kvfetch.quant.sensitivity`). KVTC (arXiv 2511.01815) transforms KV caches with principal components;
here errors are weighted by what they do to the model's output.

* Coefficients that are zero at a step in nearly all tokens are left out.
* Coefficients that need more than eight bits are stored as two integers; see `_Rows`.
* Tokens at the start of a sequence that draw attention whatever is asked (attention sinks), and tokens with a
  coefficient out of all bounds, are kept exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Never

import torch

from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.layout.frames import Layout
from sgl_kvfetch.layout.regions import region_layout
from sgl_kvfetch.quant.base import CellPlace, CellValues, Part, Quantised, Quantiser
from sgl_kvfetch.quant.exact import from_planes, to_planes
from sgl_kvfetch.quant.inverse import TransformInverse
from sgl_kvfetch.quant.profile import CellProfile, Profile
from sgl_kvfetch.quant.rope import rotate, unrotate
from sgl_kvfetch.quant.sensitivity import features, log_cost
from sgl_kvfetch.types import KVGeometry

ZERO = 128  # the integer that stands for zero
LARGEST = 127  # magnitude of an integer
_MAX_WIDE_BITS = 8
_DROPPED_LARGEST = 16.0  # steps; a token that needs more of a coefficient that is left out is kept exact

# A token's scale is a power of the square root of two, stored as its exponent, from a sixteenth to sixteen.
EXACT = 0  # in place of an exponent: the token's values are in the part "exact"
UNIT = 128  # the exponent of scale 1
_MOST_EXPONENT = 8

_HALF_LARGEST = torch.finfo(torch.float16).max
# Whether the CPU multiplies matrices in bfloat16: several times as fast as in float32, if it does.
_HAS_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))

_IDENTITY = re.compile(r"klt\(profile=[0-9a-f]{32};step=[0-9.e+-]{1,16}\)")
_PARTS = (Part("exponents"), Part("exact"), Part("coefficients", "coefficients", token_dim=1))


class KltIntegers(Quantiser):
    """All that can be done with ``klt`` integers without their profile: count, verify and look at them."""

    def __init__(self, identity: str) -> None:
        self._identity = identity

    @classmethod
    def of_identity(cls, identity: str) -> KltIntegers | None:
        return cls(identity) if _IDENTITY.fullmatch(identity) else None

    @property
    def identity(self) -> str:
        return self._identity

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return _PARTS

    def layouts(
        self, geometry: KVGeometry, cell_heads: int, most_coefficients: int | None, span_tokens: int, resolution: str
    ) -> dict[str, Layout]:
        assert most_coefficients is not None
        return {"coefficients": region_layout(most_coefficients, span_tokens, resolution)}

    def num_coefficients(self, layers: range, heads: range) -> int | None:
        self._needs_profile()

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        self._needs_profile()

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        self._needs_profile()

    def inverse_of(self, place: CellPlace) -> TransformInverse:
        self._needs_profile()

    def _needs_profile(self) -> Never:
        raise QuantiseError(f"{self._identity} needs its profile")


@dataclass(frozen=True)
class _Rows:
    """Which integers a token of a cell has at a step, and what each adds to the channels.

    The first ``kept`` integers are coefficients. Coefficient ``wide[i]`` has a second one, number ``kept + i``: its
    value is ``low + high * 2**bits[i]``, with ``low`` from ``-2**(bits[i] - 1)`` on.
    """

    kept: int
    wide: torch.Tensor  # int64
    bits: torch.Tensor  # int64, 1 to 8

    @classmethod
    def of(cls, cell: CellProfile, step: float) -> _Rows:
        usual, largest = cell.reach[0] / step, cell.reach[1] / step
        kept = max(1, int((usual > 0.5).sum()))
        needed = (largest[:kept] / LARGEST).log2().ceil().long()
        wide = (needed > 0).nonzero().squeeze(1)
        return cls(kept, wide, needed[wide].clamp_max(_MAX_WIDE_BITS))

    @property
    def count(self) -> int:
        return self.kept + self.wide.numel()

    @cached_property
    def limits(self) -> torch.Tensor:
        """The largest magnitude that each kept coefficient can have, float32 ``(kept,)``."""
        limits = torch.full((self.kept,), float(LARGEST))
        limits[self.wide] = LARGEST * 2.0**self.bits
        return limits

    def matrix(self, inverse: torch.Tensor) -> torch.Tensor:
        """``(count, C)``: what one step of each integer adds to the channels. Exact in ``inverse``'s dtype."""
        high = inverse[self.wide] * (2.0 ** self.bits[:, None]).to(inverse.dtype)
        return torch.cat((inverse[: self.kept], high))

    def integers(self, n: torch.Tensor) -> torch.Tensor:
        """uint8 ``(count, tokens)`` of whole steps ``n``, float32 ``(tokens, kept)`` within ``limits``."""
        half = 2.0 ** (self.bits - 1)
        high = ((n[:, self.wide] + half) / (2 * half)).floor()
        n[:, self.wide] -= high * 2 * half
        return (torch.cat((n, high), dim=1) + ZERO).to(torch.uint8).T.contiguous()


class KltQuantiser(KltIntegers):
    """The quantiser ``klt`` of one model, at one step."""

    def __init__(self, profile: Profile, target_kl: float | None = None, *, step: float | None = None) -> None:
        """``target_kl``: nats a token as measured in calibration; the profile's default if neither it nor ``step`` is
        given. Raises ConfigError for a target that was not measured."""
        step = profile.step_for(target_kl) if step is None else step
        super().__init__(f"klt(profile={profile.digest};step={step!r})")
        self.profile = profile
        self.step = step
        self._rows = {key: _Rows.of(cell, step) for key, cell in profile.cells.items()}
        self._matrices: dict[tuple[tuple[int, int], torch.dtype], torch.Tensor] = {}
        self._forwards: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def cell_layers(self) -> int:
        return self.profile.grid.cell_layers

    def cell_heads(self, num_heads: int) -> int:
        return self.profile.grid.cell_heads

    def num_coefficients(self, layers: range, heads: range) -> int | None:
        return self._rows[self._key(layers, heads)].count

    def num_wide(self, layers: range, heads: range) -> int:
        """Return how many coefficients of a token of this cell are two integers; the second ones come last."""
        return self._rows[self._key(layers, heads)].wide.numel()

    @property
    def coefficient_shares(self) -> tuple[float, float]:
        """How many of all coefficients are kept, and how many need two integers, as shares."""
        channels = sum(cell.num_channels for cell in self.profile.cells.values())
        rows = self._rows.values()
        return sum(r.kept for r in rows) / channels, sum(r.count - r.kept for r in rows) / channels

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        if values.k.dtype.itemsize == 1:
            raise QuantiseError(f"klt does not quantise {values.k.dtype}; use exact")
        key = self._key(place.layers, place.heads)
        cell, rows = self.profile.cells[key], self._rows[key]
        x = self._channels(values, place)
        if not bool(torch.isfinite(x).all()):
            raise QuantiseError("values are not finite")
        coefficients = (x - cell.mean) @ self._forward(key)
        cost = log_cost(features(coefficients, cell.spread, head_norms(values)), cell.sensitivity)
        exponents = exponents_of(cost)
        steps = coefficients / (scales_of(exponents) * self.step)[:, None]
        n = steps[:, : rows.kept].round()
        is_exact = (n.abs() > rows.limits).any(1) | (steps[:, rows.kept :].abs() > _DROPPED_LARGEST).any(1)
        is_exact[: max(0, self.profile.num_sinks - place.tokens.start)] = True
        n[is_exact] = 0
        exponents[is_exact] = EXACT
        return exponents, _exact_bytes(values, is_exact), rows.integers(n)

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        exponents, _, integers = quantised
        which, _ = self._exact_planes(quantised, dtype, place)  # refuses parts that do not fit together
        first, end, _ = tokens.indices(len(exponents))
        mean, rope = self.profile.cells[self._key(place.layers, place.heads)].mean, self.profile.rope
        matrix = self._matrix(place, dtype)
        n = integers[:, first:end].to(matrix.dtype).sub_(ZERO)  # exact in bfloat16, too
        scales = scales_of(exponents[first:end]) * self.step
        x = (matrix @ n).T.contiguous().float().mul_(scales[:, None]).add_(mean)
        k, v = self._split(x, place)
        if rope is not None:
            k = rotate(k, rope.table(place.tokens.start + first, end - first, k.device), rope)
        if dtype == torch.float16:  # others hold whatever float32 does
            k, v = (t.clamp_(-_HALF_LARGEST, _HALF_LARGEST) for t in (k, v))
        values = CellValues(k.to(dtype), v.to(dtype))
        wanted = (which >= first) & (which < end)
        if bool(wanted.any()):
            _, exact = self.exact_tokens(quantised, dtype, place)
            for restored, kept in zip(values, exact, strict=True):
                restored[which[wanted] - first] = kept[wanted]
        return values

    def exact_tokens(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace
    ) -> tuple[torch.Tensor, CellValues]:
        """Return which of a cell's tokens are kept exact, int64 ``(n,)``, and their values. Raises FormatError where
        the parts do not fit together."""
        which, planes = self._exact_planes(quantised, dtype, place)
        return which, CellValues(*self._split(from_planes(planes, dtype), place))

    def _exact_planes(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of a cell's tokens are kept exact, and the byte planes of their values."""
        exponents, exact, _ = quantised
        which = (exponents == EXACT).nonzero().squeeze(1)
        shape = len(which), dtype.itemsize, self.profile.cells[self._key(place.layers, place.heads)].num_channels
        if exact.numel() != math.prod(shape):
            raise FormatError(
                f"{exact.numel()} bytes of exact tokens, expected {math.prod(shape)} for {shape[0]} tokens"
            )
        return which, exact.view(shape).movedim(1, 0)

    def inverse_of(self, place: CellPlace) -> TransformInverse:
        key = self._key(place.layers, place.heads)
        cell = self.profile.cells[key]
        return TransformInverse(self._rows[key].matrix(cell.inverse), cell.mean, self.profile.rope)

    def mean_values(self, place: CellPlace, dtype: torch.dtype) -> CellValues:
        """Return the values of a cell all of whose coefficients are 0."""
        count = self._rows[self._key(place.layers, place.heads)].count
        zeros = torch.full((count, len(place.tokens)), ZERO, dtype=torch.uint8)
        exponents = torch.full((len(place.tokens),), UNIT, dtype=torch.uint8)
        return self.dequantise((exponents, torch.empty(0, dtype=torch.uint8), zeros), dtype, place)

    def _matrix(self, place: CellPlace, dtype: torch.dtype) -> torch.Tensor:
        """The way back to values of ``dtype``, transposed: so it is fastest. In bfloat16 sums are rounded as such
        values are in the end."""
        key = self._key(place.layers, place.heads)
        if (key, dtype) not in self._matrices:
            used = torch.bfloat16 if dtype == torch.bfloat16 and _HAS_BFLOAT16 else torch.float32
            self._matrices[key, dtype] = self.inverse_of(place).matrix.T.to(used).contiguous()
        return self._matrices[key, dtype]

    def _forward(self, key: tuple[int, int]) -> torch.Tensor:
        if key not in self._forwards:
            cell = self.profile.cells[key]
            self._forwards[key] = forward_of(cell.inverse, [*cell.k_weight, *cell.v_weight])
        return self._forwards[key]

    def _channels(self, values: CellValues, place: CellPlace) -> torch.Tensor:
        """``(tokens, C)`` float32, K turned back."""
        k, v, rope = values.k.float(), values.v.float(), self.profile.rope
        if rope is not None:
            k = unrotate(k, rope.table(place.tokens.start, len(k), k.device), rope)
        return torch.cat((k.flatten(1), v.flatten(1)), dim=1)

    def _split(self, channels: torch.Tensor, place: CellPlace) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, ``(tokens, layers, heads, dim)``, of ``(tokens, C)``."""
        shape = len(place.layers), len(place.heads)
        dims = self.profile.k_head_dim, self.profile.v_head_dim
        k, v = torch.split(channels, [math.prod(shape) * dim for dim in dims], dim=1)
        return k.reshape(-1, *shape, dims[0]), v.reshape(-1, *shape, dims[1])

    def _key(self, layers: range, heads: range) -> tuple[int, int]:
        grid = self.profile.grid
        key = layers.start // grid.cell_layers, heads.start // grid.cell_heads
        if key not in self.profile.cells or (grid.layers(key[0]), grid.heads(key[1])) != (layers, heads):
            raise ConfigError(
                f"layers {layers.start} to {layers.stop} and heads {heads.start} to {heads.stop} are no cell of the "
                f"profile, which has cells of {grid.cell_layers} layers and {grid.cell_heads} heads"
            )
        return key


def forward_of(inverse: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a cell's transform from channels to coefficients, float32 ``(C, C)``.

    It would be W inverse^T, had ``inverse`` not been rounded. One step of Newton's iteration makes up for that: from X
    to X (2 - inverse X), which squares the error (Schulz, "Iterative Berechnung der reziproken Matrix", 1933).

    ``inverse``: ``(C, C)``, from coefficients to channels. ``weights``: float32, the blocks of W along its diagonal.
    """
    inverse = inverse.float()
    columns = torch.split(inverse.T, [len(weight) for weight in weights])
    forward = torch.cat([weight @ column for weight, column in zip(weights, columns, strict=True)])
    return forward @ (2 * torch.eye(len(inverse)) - inverse @ forward)


def head_norms(values: CellValues) -> torch.Tensor:
    """Return the lengths of the keys, then of the values, of each layer and head: float32 ``(tokens, 2 * layers *
    heads)``."""
    return torch.cat([x.float().norm(dim=-1).flatten(1) for x in values], dim=1)


def exponents_of(log_cost: torch.Tensor) -> torch.Tensor:
    """Return the exponents of tokens' scales, uint8: a token whose errors cost n times the mean has 1 / sqrt(n)."""
    exponents = (-log_cost / math.log(2)).round().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    return (exponents + UNIT).to(torch.uint8)


def scales_of(exponents: torch.Tensor) -> torch.Tensor:
    """Return tokens' scales, float32. What an exact token has is not defined."""
    return 2.0 ** ((exponents.float() - UNIT) / 2)


def _exact_bytes(values: CellValues, which: torch.Tensor) -> torch.Tensor:
    """The values of some tokens, uint8 ``(n,)``: of each token K, then V, byte plane by byte plane."""
    kept = torch.cat([t[which].flatten(1) for t in values], dim=1)
    return to_planes(kept).movedim(0, 1).flatten()


def require_grid(profile: Profile, first_layer: int, num_layers: int, first_head: int, num_heads: int) -> None:
    """Raise ConfigError unless these layers and heads, a rank's, are whole cells of the profile."""
    grid = profile.grid
    ends = (first_layer, first_layer + num_layers)
    if any(end % grid.cell_layers and end != grid.num_layers for end in ends) or ends[1] > grid.num_layers:
        raise ConfigError(
            f"layers {ends[0]} to {ends[1]} of {grid.num_layers} cut the profile's groups of {grid.cell_layers}; give "
            "each pipeline stage whole groups, by SGLANG_PP_LAYER_PARTITION"
        )
    if first_head % grid.cell_heads or num_heads % grid.cell_heads or first_head + num_heads > grid.num_heads:
        raise ConfigError(
            f"heads {first_head} to {first_head + num_heads} of {grid.num_heads} are no whole blocks of "
            f"{grid.cell_heads}, as the profile has them; calibrate again with --tp-size"
        )
