"""Transform coding with uniform steps: few bits at a given accuracy, based on a model's calibration.

A cell is K and V of some heads of some layers. The rotary embedding of K is undone, both are centred, and all channels
of a token go through the profile's transform (`calibrate.fit`). After it, errors in all coefficients of all cells cost
the same, so all share one step. The step is multiplied by each token's scale, which is smaller for tokens whose errors
cost more. KVTC (arXiv 2511.01815) transforms KV caches with principal components; here errors are
weighted by their effect on the model's output.

* Coefficients that a step rounds to zero in nearly all tokens are left out.
* Coefficients that need more than eight bits are stored as two integers; see `_Rows`.
* Attention sinks at the start of a sequence, and tokens with a coefficient out of all bounds, are kept exact.

**A token's scale.** A few tokens receive most of the attention to a context, and errors in them cost most: on a real
language model, one token in a thousand costs a hundred times the mean. Their keys and values reveal them, so
calibration fits a linear model of the logarithm of the cost (`fit_log_cost`). The encoder gives a token whose errors
cost n times the mean a step sqrt(n) times finer. Readers need only the steps.

A coefficient tells the cost by how many standard deviations it is off. One that hardly varies tells nothing: what moves
it is rounding, of values to bfloat16, and of products, which may add 5% of a step to a coefficient. In keys of Gemma 3,
which are normalised, some channels are always 0 once the rotation is undone; as shares of their deviation, rounding
would make them the largest features of all, and scales random. So no deviation counts as smaller than a step of 1, and
the fit gives features that vary less small weights.

**On CPUs without AMX**, values are restored from integers by a matrix of int16 (`IntegerMatrix`), for exact sums.
`integer_product.h` says how it is multiplied, and why rows are frequent or rare.

**What depends on the machine.** Sums are in float32 in any order. A product in bfloat16 is rounded once more, to a
neighbour. So a writer's integers may be neighbours of another machine's: a product moves a coefficient by
`_PRODUCT_ERROR` of a step, rms, so at most one integer in twenty tips. A token between two exponents may have either.
The exponent is stored, so errors stay within half a step and that share. On a CPU with AMX, values restored in bfloat16
differ by a unit of the product, before K is rotated: beside a large channel of its pair, a small one may be off by many
of its own units. The model rounds its keys before it rotates them, too, and audits allow as much (`sums_noise`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.base import MOST_LEVELS, Wide
from sgl_kvfetch.codec.layout.frames import Layout, region_layout
from sgl_kvfetch.codec.quant import _klt
from sgl_kvfetch.codec.quant.base import (
    CellPlace,
    CellValues,
    Part,
    Quantised,
    Quantiser,
    TransformInverse,
    from_planes,
    ratio,
    sums_noise,
    to_planes,
)
from sgl_kvfetch.codec.quant.profile import CellProfile, Profile
from sgl_kvfetch.codec.quant.rope import unrotate
from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.types import KVGeometry, first_to_last


def pack(exponents: np.ndarray, exact: np.ndarray) -> tuple[bytes, int]:
    """Return what a cell has beside its frames, a multiple of 4 bytes, and its number of exact tokens.

    Args:
        exponents: uint8 ``(tokens,)``; 0 for an exact token.
        exact: uint8, the values of exact tokens: for each one byte plane after another, each of K and V
            (``quant.base.to_planes``).
    """
    which = b""
    if exact.size:
        which = np.flatnonzero(exponents == EXACT).astype(np.int32).tobytes()
    packed = which + exponents.tobytes() + exact.tobytes()
    return packed + bytes(-len(packed) % 4), len(which) // 4


TILE_CHANNELS = 32  # as in integer_product.h
MOST_RARE_ENTRY = 4095  # as in integer_product.h

_MATRIX_ERROR = 0.01  # as a share of a channel's noise of rounding, rms: what the matrix may add
_MOST_RARE_ERROR = 0.002  # the same, by the entries of rare rows, which have 13 bits
_RARE_SPREAD = 1.75  # in steps; above it a list of rows to add costs more than a product
_MOST_RARE_ROWS = 2**13 - 2  # numbers of 16 bits count eighths of a row
_LARGEST = 128  # of an integer's magnitude
_LEAST = 2.0**-100  # of a channel's entries, where all are zero


class IntegerMatrix(NamedTuple):
    """A matrix ``(rows, channels)``, rounded to integers. All tensors are contiguous.

    Attributes:
        frequent_rows: int32 ``(pairs, 2)``. Where the number of frequent rows is odd, the last one comes twice, the
            second time with entries of zero.
        shifts: uint8 ``(rows,)``: a row's integers count ``2**shift`` times.
        rare_rows: int32 ``(rare,)``.
        frequent: int16 ``(tiles, pairs, TILE_CHANNELS, 2)``.
        rare: int16 ``(tiles, 1 + rare, TILE_CHANNELS / 2, 2)``, channels half a tile apart. The first row is zero.
        units: float32 ``(2, tiles * TILE_CHANNELS)``: of the entries of frequent rows, and of rare ones.
    """

    frequent_rows: torch.Tensor
    shifts: torch.Tensor
    rare_rows: torch.Tensor
    frequent: torch.Tensor
    rare: torch.Tensor
    units: torch.Tensor

    @classmethod
    def of(
        cls, inverse: torch.Tensor, shifts: torch.Tensor, spread: torch.Tensor, most_error: float = _MATRIX_ERROR
    ) -> IntegerMatrix | None:
        """Return None if rounding ``inverse`` would add errors that matter.

        Args:
            inverse: ``(rows, channels)``, without shifts.
            shifts: int64 ``(rows,)``.
            spread: float32 ``(kept,)``, in steps, of the first rows' coefficients. The other rows are the higher
                integers of some of these coefficients.
            most_error: The rms error, as a share of the noise that rounding coefficients to steps makes in a channel.
        """
        inverse, kept = inverse.double(), len(spread)
        noise = (inverse[:kept].norm(dim=0) / math.sqrt(12)).clamp_min(_LEAST)
        is_rare = _rare_rows(inverse, spread.double(), noise)
        frequent_rows, rare_rows = (~is_rare).nonzero().squeeze(1), is_rare.nonzero().squeeze(1)
        # Units of frequent rows are powers of two, so entries of a bfloat16 matrix are exact, except the smallest of a
        # channel. Sums fit int32 whatever the integers, down to -128, and although entries are rounded up.
        frequent, rare = inverse[frequent_rows], inverse[rare_rows]
        largest = _LARGEST * 2.0 ** shifts[frequent_rows].double()
        room = torch.minimum(
            (2**15 - 1) / _largest_of(frequent),
            (2**31 - 1 - largest.sum() / 2) / (largest @ frequent.abs()).clamp_min(_LEAST),
        )
        units, rare_units = 0.5 ** room.log2().floor(), _largest_of(rare) / MOST_RARE_ENTRY
        entries, rare_entries = (frequent / units).round(), (rare / rare_units).round()
        error = torch.empty_like(inverse)
        error[frequent_rows], error[rare_rows] = entries * units - frequent, rare_entries * rare_units - rare
        error = (error[:kept] * spread[:, None]).norm(dim=0) / noise
        if not float(error.square().mean().sqrt()) <= most_error:
            return None
        is_odd = len(frequent_rows) % 2
        pairs = torch.cat((frequent_rows, frequent_rows[-1:])) if is_odd else frequent_rows
        by_pair = _tiles(torch.nn.functional.pad(entries, (0, 0, 0, is_odd)))
        by_rare = _tiles(torch.nn.functional.pad(rare_entries, (0, 0, 1, 0)))
        num_tiles, num_rows, _ = by_pair.shape
        return cls(
            pairs.int().view(-1, 2),
            shifts.to(torch.uint8),
            rare_rows.int(),
            by_pair.view(num_tiles, num_rows // 2, 2, TILE_CHANNELS).transpose(2, 3).contiguous(),
            by_rare.view(num_tiles, -1, 2, TILE_CHANNELS // 2).transpose(2, 3).contiguous(),
            torch.nn.functional.pad(torch.stack((units, rare_units)), (0, -inverse.shape[1] % TILE_CHANNELS)).float(),
        )


def _rare_rows(inverse: torch.Tensor, spread: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return which rows are rare, bool ``(rows,)``: of those with little spread as many as errors allow."""
    order = spread.argsort()[: int((spread <= _RARE_SPREAD).sum())][:_MOST_RARE_ROWS]
    units = _largest_of(inverse[order]) / MOST_RARE_ENTRY
    error = (spread[order, None] * units / math.sqrt(12) / noise).square().mean(1).cumsum(0).sqrt()
    is_rare = torch.zeros(len(inverse), dtype=torch.bool)
    is_rare[order[error <= _MOST_RARE_ERROR]] = True
    return is_rare


def _largest_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each channel, not zero."""
    return torch.cat((rows.abs(), rows.new_full((1, rows.shape[1]), _LEAST))).amax(0)


def _tiles(entries: torch.Tensor) -> torch.Tensor:
    """Return ``(rows, channels)`` as int16 ``(tiles, rows, TILE_CHANNELS)``."""
    filled = torch.nn.functional.pad(entries.short(), (0, -entries.shape[1] % TILE_CHANNELS))
    num_rows, num_channels = filled.shape
    return filled.view(num_rows, num_channels // TILE_CHANNELS, TILE_CHANNELS).transpose(0, 1).contiguous()


# Limit of a coefficient in the features, in standard deviations: outliers would lead to absurd predictions.
MOST_DEVIATIONS = 8.0
LEAST_SPREAD = 1.0  # of a coefficient: a step of 1
LEAST_NORM = 1e-6

# Weight of the ridge penalty, in units of the deviance. A smaller one overfits the calibration windows. Values from 0.5
# to 3 make no measurable difference.
_RIDGE = 1.0
_LEAST_DEVIATION = 0.1  # of a feature: the penalty keeps the weights of those that vary less small
_FIT_STEPS = 40
_MOST_LOG = 20.0


def features(coefficients: torch.Tensor, spread: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return the features that predict tokens' costs, float32 ``(tokens, C + heads)``.

    ``coefficients``: ``(tokens, C)``. ``spread``: ``(C,)``, their standard deviations, in steps of 1. ``norms``:
    ``(tokens, heads)``, the lengths of the keys and values of each layer and head.
    """
    deviations = (coefficients / spread.clamp_min(LEAST_SPREAD)).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
    return torch.cat((deviations, norms.clamp_min(LEAST_NORM).log()), dim=1)


def log_cost(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of tokens' costs, ``(tokens,)``; 0 is the mean cost.

    ``weights``: one a feature, and a constant.
    """
    return features @ weights[:-1] + weights[-1]


def fit_log_cost(features: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """Return the weights, float32 ``(features + 1,)``, of a log-linear model of ``costs``.

    It minimises E[cost / predicted + log predicted], the deviance of a Gamma distribution (McCullagh and Nelder,
    *Generalized Linear Models*, 1989, chapter 8). This is the right loss for choosing steps by the prediction: at fine
    steps the first term is the cost of the errors, and the second term is twice the bits, in nats.

    ``features``: float32 ``(tokens, n)``. ``costs``: float32 ``(tokens,)``, none negative.
    """
    centre, spread = features.mean(0), features.std(0).clamp_min(_LEAST_DEVIATION)
    x = (features - centre) / spread
    mean = costs.mean().clamp_min(torch.finfo(torch.float32).tiny)
    costs = costs / mean
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=_FIT_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def deviance() -> torch.Tensor:
        optimiser.zero_grad()
        log = x @ weights[:-1] + weights[-1]
        loss = (costs * (-log).clamp(-_MOST_LOG, _MOST_LOG).exp()).mean() + log.mean()
        loss = loss + _RIDGE * weights[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(deviance)  # type: ignore[no-untyped-call]
    fitted = weights.detach()
    slopes = fitted[:-1] / spread
    return torch.cat((slopes, (fitted[-1] - slopes @ centre)[None]))


ZERO = 128  # the integer that represents zero
LARGEST = 127  # largest magnitude of an integer
_DROPPED_LARGEST = 16.0  # steps, of a coefficient that is not kept
# A token has so many sums, with random signs, of its coefficients that are not kept. The mean of their squares
# estimates the sum of the squares: at least 256 if one is out of bounds. Above 128 (in klt.cpp) they are computed.
_RANDOM_SUMS = 8  # as in klt.cpp
_ALIGNMENT = 16  # of the columns of a matrix: matrices of other sizes are multiplied more slowly
_MAX_WIDE_BITS = 8
_PRODUCT_ERROR = 0.05  # steps, rms, that a product in bfloat16 may add to a coefficient: 3% of the noise of rounding

# A token's scale is a power of the square root of two, from 1/16 to 16, stored as its exponent.
EXACT = 0  # instead of an exponent: the token's values are in the part "exact"
UNIT = 128  # the exponent of scale 1
_MOST_EXPONENT = 8
_EXPONENTS = bytes([EXACT, *range(UNIT - _MOST_EXPONENT, UNIT + _MOST_EXPONENT + 1)])

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of the native half
# Whether the CPU multiplies matrices in bfloat16, which is several times as fast as float32.
_HAS_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))
# Whether the native half multiplies int16 with AVX2 or AVX-512, which is faster than float32, and, without AMX, than
# bfloat16.
_HAS_INTEGERS = bool(torch.cpu.get_capabilities().get("avx2"))
_HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))

KLT_IDENTITY = re.compile(r"klt\(profile=[0-9a-f]{32};step=[0-9.e+-]{1,16}\)")
_PARTS = (Part("exponents"), Part("exact"), Part("coefficients", "coefficients", token_dim=1))


class KltIntegers(Quantiser):
    """Handles ``klt`` integers without their profile: counts, verifies and displays them."""

    knows_cells = False

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return _PARTS

    def layouts(
        self, geometry: KVGeometry, cell_heads: int, most_coefficients: int | None, span_tokens: int, resolution: str
    ) -> dict[str, Layout]:
        assert most_coefficients is not None
        return {"coefficients": region_layout(most_coefficients, span_tokens, resolution)}

    def require_sound(self, plain: Sequence[np.ndarray], shape: tuple[int, int, int], token_bytes: int) -> None:
        exponents, exact = plain
        if exponents.size != shape[0]:
            raise FormatError(f"{exponents.size} exponents, expected one for each of {shape[0]} tokens")
        found = exponents.tobytes()
        num_exact = found.count(EXACT)
        if found.translate(None, _EXPONENTS):
            raise FormatError(f"an exponent is not {UNIT - _MOST_EXPONENT} to {UNIT + _MOST_EXPONENT}, nor {EXACT}")
        if exact.size != num_exact * token_bytes:
            raise FormatError(
                f"{exact.size} bytes of exact tokens, expected {num_exact * token_bytes} for {num_exact} tokens"
            )

    def some_tokens(self, parts: Quantised, tokens: slice) -> Quantised:
        exponents, exact, integers = parts
        if exact.numel():  # which is rare
            is_exact = exponents == EXACT
            token_bytes = exact.numel() // int(is_exact.sum())
            before, here = (token_bytes * int(is_exact[x].sum()) for x in (slice(tokens.start), tokens))
            exact = exact[before : before + here]
        return exponents[tokens], exact, integers[:, tokens]

    def split_cells(
        self, rows: torch.Tensor, exact: torch.Tensor, sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Quantised]:
        exponents, *integers = torch.split(rows, [len(sizes), *(num_rows for num_rows, _ in sizes)])
        exact_of_cells = torch.split(exact, [num_bytes for _, num_bytes in sizes])
        return list(zip(exponents, exact_of_cells, integers, strict=True))

    def quantise(self, *args: Any, **kwargs: Any) -> Any:
        raise QuantiseError(f"{self.identity} needs its profile to convert values")

    num_coefficients = dequantise = inverse_of = quantise


@dataclass(frozen=True)
class _Rows:
    """The integers of a token in a cell at a step, and the contribution of each to the channels.

    The first ``kept`` integers are coefficients. Coefficient ``wide[i]`` has a second integer, number ``kept + i``: its
    value is ``low + high * 2**bits[i]``, where ``low`` starts at ``-2**(bits[i] - 1)``.
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

    def integer_matrix(self, cell: CellProfile, step: float) -> IntegerMatrix | None:
        """Return `matrix` in int16, or None where its rounding would matter."""
        inverse = torch.cat((cell.inverse[: self.kept], cell.inverse[self.wide]))
        shifts = torch.cat((torch.zeros(self.kept, dtype=torch.int64), self.bits))
        return IntegerMatrix.of(inverse, shifts, cell.spread[: self.kept] / step)

    def matrix(self, inverse: torch.Tensor) -> torch.Tensor:
        """Return ``(count, C)``: the channels of one step of each integer. Exact in ``inverse``'s dtype."""
        high = inverse[self.wide] * (2.0 ** self.bits[:, None]).to(inverse.dtype)
        return torch.cat((inverse[: self.kept], high))


class _Forward(NamedTuple):
    """What quantises a cell of C channels. At the default, four of ten coefficients are not kept. All that is needed of
    these is their part of a token's cost, and whether one is out of bounds; so sums of them are computed instead.

    Attributes:
        matrix: ``(C, columns)``, in the type of the product: from channels to the kept coefficients; to the others'
            part of the cost; to sums of the others with random signs; zeros.
        others: ``(C, C - kept)``, from channels to the coefficients that are not kept.
        inverse_spread: float32 ``(C,)``, of the coefficients, as the features have it.
        weights: float32, of the kept coefficients in the cost, of the norms, and a constant.
        most_cost: The largest magnitude of the others' part of the cost: as for each of the features, a number of
            deviations, if they are independent.
    """

    matrix: torch.Tensor
    others: torch.Tensor
    inverse_spread: torch.Tensor
    weights: torch.Tensor
    most_cost: float

    @classmethod
    def of(cls, cell: CellProfile, step: float, kept: int) -> _Forward:
        """Return a cell's transform for a step, of whose coefficients the first ``kept`` are computed. The others are
        bounded."""
        whole = forward_of(cell.inverse, [*cell.k_weight, *cell.v_weight])
        product_type = torch.float32
        if _HAS_BFLOAT16:
            # Both factors are rounded to eight bits, so the errors of their products are independent, and as large as
            # those of channels that have eight bits.
            deviations = (cell.spread[:, None] * cell.inverse.float()).norm(dim=0)
            error = (deviations[:, None] * whole).norm(dim=0) * math.sqrt(2 / 3) * 2.0**-9
            if float(error.square().mean().sqrt()) <= _PRODUCT_ERROR * step:
                product_type = torch.bfloat16
        spread = cell.spread.clamp_min(LEAST_SPREAD)
        others, weights = whole[:, kept:], cell.sensitivity[kept : len(whole)]
        signs = torch.randint(2, (others.shape[1], _RANDOM_SUMS), generator=torch.Generator().manual_seed(0))
        sums = others @ torch.cat(((weights / spread[kept:])[:, None], 2.0 * signs - 1), dim=1)
        padding = torch.zeros(len(whole), -(kept + sums.shape[1]) % _ALIGNMENT)
        return cls(
            torch.cat((whole[:, :kept], sums, padding), dim=1).to(product_type),
            others.to(product_type),
            1 / spread,
            torch.cat((cell.sensitivity[:kept], cell.sensitivity[len(whole) :])),
            MOST_DEVIATIONS * float(weights.norm()),
        )


class KltForward(NamedTuple):
    """What the kernels quantise a cell of C channels with; see ``triton_kernels.quantise_klt``.

    Attributes:
        matrix: ``(C, C)``, from channels to coefficients, float32 or bfloat16 as on this CPU.
        mean: float32 ``(C,)``.
        inverse_spread: float32 ``(C,)``, of the coefficients.
        sensitivity: float32 ``(C + norms + 1,)``.
        limits: float32 ``(C,)``, the largest magnitude of a coefficient in steps, also of those that are not kept.
        bits: int32 ``(C,)``, of the lower of a coefficient's two integers; 0 for those that have one.
        high: int32 ``(C,)``, the row of the higher one.
        inverse_steps: float32 ``(256,)``, by a token's exponent.
        kept: The number of coefficients that are kept.
        num_rows: The number of integers of a token.
        interleaved: Whether rotations turn pairs of neighbours, as in GPT-J.
        turns: Which of the profile's rotations each layer of the cell has.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    inverse_spread: torch.Tensor
    sensitivity: torch.Tensor
    limits: torch.Tensor
    bits: torch.Tensor
    high: torch.Tensor
    inverse_steps: torch.Tensor
    kept: int
    num_rows: int
    interleaved: bool
    turns: tuple[int, ...]


class KltQuantiser(KltIntegers):
    """The quantiser ``klt`` of one model, at one step."""

    knows_cells = True
    gpu_restores = True
    gpu_quantises = True
    profile: Profile

    def __init__(self, profile: Profile, target_kl: float | None = None, *, step: float | None = None) -> None:
        """``target_kl``: nats per token as measured in calibration. Without it and ``step``, the profile's default is
        used. Raises ConfigError for a target outside the calibrated range."""
        step = profile.step_for(target_kl) if step is None else step
        super().__init__(f"klt(profile={profile.digest};step={step!r})")
        self.profile = profile
        self.step = step
        self._rows = {key: _Rows.of(cell, step) for key, cell in profile.cells.items()}
        self._matrices: dict[tuple[tuple[int, int], torch.dtype], torch.Tensor | IntegerMatrix] = {}
        self._forwards: dict[tuple[int, int], _Forward] = {}

    @property
    def cell_layers(self) -> int:
        return self.profile.grid.cell_layers

    @property
    def cell_heads(self) -> int:
        return self.profile.grid.cell_heads

    def num_coefficients(self, place: CellPlace) -> int | None:
        return self._rows[self._key(place)].count

    def wide_coefficients(self, place: CellPlace) -> Sequence[Wide]:
        rows = self._rows[self._key(place)]
        return list(map(Wide, rows.wide.tolist(), rows.bits.tolist()))

    def coarseness_within(self, max_kl: float, key: str) -> int:
        costs = [self.profile.kl_of(self.step * 3**count) for count in range(1, MOST_LEVELS)]
        if max_kl < costs[0]:
            raise ConfigError(f"{key} = {max_kl:g} is below {costs[0]:.2g}, the cost of a step three times as large")
        return sum(cost <= max_kl for cost in costs)

    @property
    def coefficient_shares(self) -> tuple[float, float]:
        """The shares of all coefficients that are kept, and that need two integers."""
        channels = sum(cell.num_channels for cell in self.profile.cells.values())
        rows = self._rows.values()
        return sum(r.kept for r in rows) / channels, sum(r.count - r.kept for r in rows) / channels

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        """Return exponents, the bytes of exact tokens, and integers. Tokens whose dropped coefficients are large stay
        exact."""
        key = self._key(place)
        rows, forward = self._rows[key], self._forward_at(key)
        centred, log_norms = self._centred(values, place, forward.matrix.dtype)
        product = centred @ forward.matrix
        num_tokens, columns = product.shape
        exponents = torch.empty(num_tokens, dtype=torch.uint8)
        integers = torch.empty((rows.count, num_tokens), dtype=torch.uint8)
        is_doubtful = torch.empty(num_tokens, dtype=torch.bool)
        sinks = max(0, self.profile.num_sinks - place.tokens.start)
        of_rows = forward.inverse_spread, forward.weights, rows.limits, rows.wide, rows.bits
        tensors = product, *of_rows, log_norms, exponents, integers, is_doubtful
        assert all(x.is_contiguous() for x in tensors)
        sizes = num_tokens, log_norms.shape[1] // 2, columns, rows.kept, len(rows.wide), sinks
        _klt.round_steps(*sizes, self.step, forward.most_cost, _TYPES[product.dtype], *_addresses(tensors))
        doubtful = is_doubtful.nonzero().squeeze(1)
        if len(doubtful):
            steps = (centred[doubtful] @ forward.others).float().abs().amax(1) / self.step
            out_of_bounds = doubtful[~(steps <= _DROPPED_LARGEST * scales_of(exponents[doubtful]))]
            exponents[out_of_bounds] = EXACT
            integers[:, out_of_bounds] = ZERO
        return exponents, exact_bytes(values, exponents == EXACT), integers

    def forward(self, place: CellPlace) -> KltForward:
        key = self._key(place)
        cell, rows = self.profile.cells[key], self._rows[key]
        limits = torch.full((cell.num_channels,), _DROPPED_LARGEST)
        limits[: rows.kept] = rows.limits
        bits, high = torch.zeros((2, cell.num_channels), dtype=torch.int32)
        bits[rows.wide], high[rows.wide] = rows.bits.int(), torch.arange(rows.kept, rows.count, dtype=torch.int32)
        inverse_steps = 1 / (scales_of(torch.arange(256)) * self.step)
        rows_of = limits, bits, high, inverse_steps, rows.kept, rows.count
        forward, is_interleaved = self._forward_at(key), self._shape_of_heads()[3]
        matrix = torch.cat((forward.matrix[:, : rows.kept], forward.others), dim=1)
        turns = tuple(self._turns(place).tolist())
        return KltForward(matrix, cell.mean, forward.inverse_spread, cell.sensitivity, *rows_of, is_interleaved, turns)

    def _forward_at(self, key: tuple[int, int]) -> _Forward:
        if key not in self._forwards:
            self._forwards[key] = _Forward.of(self.profile.cells[key], self.step, self._rows[key].kept)
        return self._forwards[key]

    def _centred(
        self, values: CellValues, place: CellPlace, product_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(tokens, C)`` of ``product_type``, without mean and rotation, and the logarithms of heads' norms."""
        if values.k.dtype not in _TYPES:
            values = CellValues(*(x.float() for x in values))
        k, v = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in values)
        num_tokens, layers, heads, _ = k.shape
        mean, rotations = self.profile.cells[self._key(place)].mean, self.profile.rotations
        table = mean if rotations is None else rotations.inverse_table(place.tokens.start, num_tokens)
        turns = self._turns(place)
        centred = torch.empty((num_tokens, len(mean)), dtype=product_type)
        log_norms = torch.empty((num_tokens, 2 * layers * heads))
        assert {x.device.type for x in values} == {"cpu"}
        assert k.dtype == v.dtype
        strides = [(x.data_ptr(), *(n * x.itemsize for n in x.stride()[:2])) for x in (k, v)]
        is_finite = _klt.centre(
            *(num_tokens, layers * heads, layers, *self._shape_of_heads()),
            *(_TYPES[product_type], _TYPES[k.dtype], *_addresses((mean, table)), *strides[0], *strides[1]),
            *_addresses((centred, log_norms, turns)),
        )
        if not is_finite:
            raise QuantiseError("values are not finite")
        return centred, log_norms

    def error_ratios(
        self, computed: CellValues, restored: CellValues, place: CellPlace, coarser: float = 1.0
    ) -> torch.Tensor:
        """As the profile weighs errors, and as it says what they cost at this step. W is block-diagonal, so the cost of
        a cell's errors is the sum of those of its layers and tensors.

        What sums in bfloat16 change is allowed also where values are float32: no model is the worse for it. Behind
        restored values, those of a model in float32 differ by as much as those of the same model in bfloat16."""
        exponents = self.quantise(computed, place)[0]
        finest = torch.tensor(2.0 ** (-_MOST_EXPONENT / 2))  # for what is kept exact: it would need a step as fine
        scales = torch.where(exponents == EXACT, finest, scales_of(exponents))
        step = self.profile.claimed_step(self.step * coarser)
        cell = self.profile.cells[self._key(place)]
        noise = max(map(sums_noise, (computed.k.dtype, torch.bfloat16)))
        found = []
        for x, y, w in zip(computed, restored, (cell.k_weight, cell.v_weight), strict=True):
            error, own = x.float() - y.float(), x.float()
            if w is cell.k_weight:
                error, own = self._unrotated(error, place), self._unrotated(own, place)
            usual = w.shape[-1] * (step * scales) ** 2 / 12
            found.append(ratio(_cost(error, w), usual + noise * _cost(own, w)))
        return torch.stack(found)

    def _shape_of_heads(self) -> tuple[int, int, int, bool]:
        """Return the dimensions of K and V, the pairs of channels that rotate, and whether they are interleaved."""
        x = self.profile.rotations
        pairs, is_interleaved = (0, False) if x is None else (x.rotary_dim // 2, x.interleaved)
        return self.profile.k_head_dim, self.profile.v_head_dim, pairs, is_interleaved

    def _unrotated(self, k: torch.Tensor, place: CellPlace) -> torch.Tensor:
        """Return K, float32 ``(tokens, layers, heads, dim)``, without its rotation."""
        x = self.profile.rotations
        if x is None:
            return k
        tables = x.table(place.tokens.start, len(place.tokens))
        layers = zip(k.unbind(1), x.of(place.layers), strict=True)
        return torch.stack([unrotate(of_layer, tables[i], x.ropes[i]) for of_layer, i in layers], 1)

    def _turns(self, place: CellPlace) -> torch.Tensor:
        """Return which rotation each layer of a cell has, int64 ``(layers,)``."""
        x = self.profile.rotations
        return torch.zeros(len(place.layers), dtype=torch.int64) if x is None else torch.tensor(x.of(place.layers))

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        exponents, _, integers = quantised
        which, exact = self.exact_tokens(quantised, dtype, place)
        first, end, _ = tokens.indices(len(exponents))
        mean, rotations = self.profile.cells[self._key(place)].mean, self.profile.rotations
        scales = scales_of(exponents[first:end]) * self.step
        table = mean if rotations is None else rotations.table(place.tokens.start + first, end - first)
        values = self._restored(integers[:, first:end], (scales, mean, table), dtype, place)
        wanted = (which >= first) & (which < end)
        for restored, kept in zip(values, exact, strict=True):
            restored[which[wanted] - first] = kept[wanted]
        return values

    def _restored(
        self,
        integers: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        place: CellPlace,
    ) -> CellValues:
        """Return the values of a cell's ``integers``. ``factors``: tokens' scales, the mean, and the rotations."""
        num_tokens, heads = integers.shape[1], len(place.layers) * len(place.heads)
        native = dtype if dtype in _TYPES else torch.float32
        shape = num_tokens, len(place.layers), len(place.heads)
        k, v = (torch.empty((*shape, dim), dtype=native) for dim in (self.profile.k_head_dim, self.profile.v_head_dim))
        of_heads = self._shape_of_heads()
        restore_integers(self._matrix(place, dtype), integers, heads, of_heads, factors, (k, v), self._turns(place))
        if native != dtype:
            largest = torch.finfo(dtype).max
            k, v = (t.clamp_(-largest, largest).to(dtype) for t in (k, v))
        return CellValues(k, v)

    def exact_tokens(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace
    ) -> tuple[torch.Tensor, CellValues]:
        """Return the indices of a cell's exact tokens, int64 ``(n,)``, and their values."""
        exponents, exact, _ = quantised
        which = (exponents == EXACT).nonzero().squeeze(1)
        shape = len(which), dtype.itemsize, self.profile.cells[self._key(place)].num_channels
        planes = exact.view(shape).movedim(1, 0)
        return which, CellValues(*self._split(from_planes(planes, dtype), place))

    def inverse_of(self, place: CellPlace) -> TransformInverse:
        key = self._key(place)
        cell = self.profile.cells[key]
        turns = tuple(self._turns(place).tolist())
        matrix = self._rows[key].matrix(cell.inverse)
        return TransformInverse(matrix, cell.mean, self.profile.rotations, turns, self.step)

    def mean_values(self, place: CellPlace, dtype: torch.dtype) -> CellValues:
        """Return a cell's values if all its coefficients are 0."""
        count = self._rows[self._key(place)].count
        zeros = torch.full((count, len(place.tokens)), ZERO, dtype=torch.uint8)
        exponents = torch.full_like(zeros[0], UNIT)
        return self.dequantise((exponents, zeros[:0].flatten(), zeros), dtype, place)

    def _matrix(self, place: CellPlace, dtype: torch.dtype) -> torch.Tensor | IntegerMatrix:
        """Return the inverse transform for values of ``dtype``. For bfloat16 it may be bfloat16, so that sums are
        rounded as the values are in the end."""
        key = self._key(place)
        if (key, dtype) not in self._matrices:
            self._matrices[key, dtype] = self._make_matrix(place, dtype)
        return self._matrices[key, dtype]

    def _make_matrix(self, place: CellPlace, dtype: torch.dtype) -> torch.Tensor | IntegerMatrix:
        key, is_bfloat16 = self._key(place), dtype == torch.bfloat16 and _HAS_BFLOAT16
        if _HAS_INTEGERS and not (is_bfloat16 and _HAS_AMX):
            integers = self._rows[key].integer_matrix(self.profile.cells[key], self.step)
            if integers is not None:
                return integers
        return self.inverse_of(place).matrix.to(torch.bfloat16 if is_bfloat16 else torch.float32).contiguous()

    def _split(self, channels: torch.Tensor, place: CellPlace) -> tuple[torch.Tensor, torch.Tensor]:
        """Split ``(tokens, C)`` into K and V, ``(tokens, layers, heads, dim)``."""
        shape = len(place.layers), len(place.heads)
        dims = self.profile.k_head_dim, self.profile.v_head_dim
        k, v = torch.split(channels, [math.prod(shape) * dim for dim in dims], dim=1)
        return k.reshape(-1, *shape, dims[0]), v.reshape(-1, *shape, dims[1])

    def _key(self, place: CellPlace) -> tuple[int, int]:
        grid, layers, heads = self.profile.grid, place.layers, place.heads
        key = layers.start // grid.cell_layers, heads.start // grid.cell_heads
        if key not in self.profile.cells or (grid.layers(key[0]), grid.heads(key[1])) != (layers, heads):
            raise ConfigError(
                f"layers {first_to_last(layers.start, layers.stop)} and heads {first_to_last(heads.start, heads.stop)} "
                "are not a cell of the profile, "
                f"which has cells of {grid.cell_layers} layers and {grid.cell_heads} heads"
            )
        return key


def restore_integers(
    matrix: torch.Tensor | IntegerMatrix,
    integers: torch.Tensor,
    heads: int,
    shape_of_heads: tuple[int, int, int, bool],
    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    turns: torch.Tensor,
    *,
    is_portable: bool = False,
) -> None:
    """Write K and V of ``integers``, uint8 ``(count, tokens)``, to ``values``. The rest: see _klt.pyi."""
    sizes, type_ = (integers.shape[1], heads, len(turns), *shape_of_heads), _TYPES[values[0].dtype]
    assert all(x.is_contiguous() and not x.is_cuda for x in (*factors, *values))
    if isinstance(matrix, IntegerMatrix):
        assert len(integers) == len(matrix.shifts), (len(integers), len(matrix.shifts))
        integers = integers if integers.stride(1) == 1 else integers.contiguous()
        of_matrix = integers.stride(0), len(matrix.frequent_rows), len(matrix.rare_rows), is_portable
        tensors = *factors, *values, integers, *matrix, turns
        _klt.restore_integers(*sizes, type_, *of_matrix, *_addresses(tensors))
    else:
        n = integers.T.to(matrix.dtype, memory_format=torch.contiguous_format).sub_(ZERO)  # exact
        product = n @ matrix
        _klt.restore(*sizes, _TYPES[product.dtype], type_, *_addresses((product, *factors, *values, turns)))


def forward_of(inverse: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a cell's transform from channels to coefficients, float32 ``(C, C)``.

    It would be W inverse^T if ``inverse`` were not rounded. One step of Newton's iteration corrects that: from X to
    X (2 - inverse X), which squares the error (Schulz, "Iterative Berechnung der reziproken Matrix", 1933).

    ``inverse``: ``(C, C)``, from coefficients to channels. ``weights``: float32, the blocks of W along its diagonal.
    """
    inverse = inverse.float()
    columns = torch.split(inverse.T, [len(weight) for weight in weights])
    forward = torch.cat([weight @ column for weight, column in zip(weights, columns, strict=True)])
    return forward @ (2 * torch.eye(len(inverse)) - inverse @ forward)


def _cost(errors: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the cost of errors, ``(tokens, layers, heads, dim)``, in each layer and token. ``blocks``: those of W."""
    x = errors.flatten(2).movedim(1, 0)
    return (x @ blocks * x).sum(2)


def head_norms(values: CellValues) -> torch.Tensor:
    """Return the norms of keys, then values, by layer and head: float32 ``(tokens, 2 * layers * heads)``."""
    return torch.cat([x.float().norm(dim=-1).flatten(1) for x in values], dim=1)


def exponents_of(log_cost: torch.Tensor) -> torch.Tensor:
    """Return the exponents of tokens' scales, uint8. The scale is 1 / sqrt(n) if errors cost n times the mean."""
    exponents = (-log_cost / math.log(2)).round().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    return (exponents + UNIT).to(torch.uint8)


def scales_of(exponents: torch.Tensor) -> torch.Tensor:
    """Return tokens' scales, float32. The scale of an exact token is undefined."""
    return 2.0 ** ((exponents.float() - UNIT) / 2)


def _addresses(tensors: Sequence[torch.Tensor]) -> Iterator[int]:
    return (x.data_ptr() for x in tensors)


def exact_bytes(values: CellValues, which: torch.Tensor) -> torch.Tensor:
    """Return the values of some tokens, uint8 ``(n,)``: for each token K, then V, byte plane by byte plane."""
    kept = torch.cat([t[which].flatten(1) for t in values], dim=1)
    return torch.stack(to_planes(kept), 1).flatten()


def require_grid(profile: Profile, first_layer: int, num_layers: int, first_head: int, num_heads: int) -> None:
    """Raise ConfigError unless a rank's layers and heads are whole cells of the profile."""
    grid = profile.grid
    ends = (first_layer, first_layer + num_layers)
    if any(end % grid.cell_layers and end != grid.num_layers for end in ends) or ends[1] > grid.num_layers:
        raise ConfigError(
            f"layers {ends[0]} to {ends[1]} of {grid.num_layers} split the profile's groups of {grid.cell_layers}; "
            "give each pipeline stage whole groups with SGLANG_PP_LAYER_PARTITION"
        )
    if first_head % grid.cell_heads or num_heads % grid.cell_heads or first_head + num_heads > grid.num_heads:
        raise ConfigError(
            f"heads {first_to_last(first_head, first_head + num_heads)} of {grid.num_heads} are not whole blocks of "
            f"{grid.cell_heads}, as in the profile; calibrate again with --tp-size"
        )
