"""Calibrate a model: gather its moments, derive its transform, and measure the accuracy and size at each step.

The transform of a cell is a Karhunen-Loeve transform that weighs errors by their cost. Let S be the covariance of the
cell's channels and W their weight: an error e costs e^T W e / 2. In coordinates z = W^(1/2) x an error's cost is half
its squared length, whatever its direction, so one uniform step serves all coordinates (Gersho and Gray, *Vector
Quantization and Signal Compression*, 1992, section 8.3). Rotating them to the eigenvectors of the covariance there,
W^(1/2) S W^(1/2), keeps the cost and minimises the sum of the entropies (Goyal, "Theoretical foundations of transform
coding", 2001). So layers, heads, channels and directions that hardly matter are coarsely quantised without further
rules.

W is made from the Fisher information of the channels. Only its blocks within one layer's K or V are used: measured over
blocks as wide as a cell, the information overfits the few windows it is measured on (docs/codec.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from sgl_kvfetch.codec.calibrate.model import KVModel
from sgl_kvfetch.codec.calibrate.statistics import MOST_SINKS, Moments, channels_of, gather_window
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import KltQuantiser, exponents_of, forward_of, head_norms, scales_of
from sgl_kvfetch.codec.quant.profile import Calibration, CellProfile, MeasuredStep, Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.codec.quant.sensitivity import features, fit_log_cost, log_cost
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import TENSORS, CellGrid

# The KL divergence that a step of 1 should cost, as the Fisher information predicts for fine steps.
_UNIT_KL = 1e-4
_STEPS = tuple(2.0 ** (1.5 * i - 5) for i in range(8))
_SAMPLE_BYTES = 1 << 30  # limit of the tokens that are kept for fitting their costs
_ROWS_AT_ONCE = 64  # of distributions, which are as wide as the vocabulary
_MOST_LAYERS = 12  # in one cell: the restore kernel is unrolled over them
_FEW_NEED_MORE = 0.99  # a coefficient that is zero in this fraction of the tokens is left out

# The share of the weight that uses only the diagonal of the information: entries off the diagonal are known less
# well. From 0.1 to 0.7 makes little difference on text of the calibration's kind; on other text 0.3 saves 5%.
_DIAGONAL_SHARE = 0.3

# Directions that do not matter in this little text may matter elsewhere: no weight is below this share of the mean.
_FLOOR = 0.05

# No block weighs less than this share of the mean block: a block that the output does not depend on, such as a pruned
# head, still needs a transform.
_BLOCK_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Settings of a calibration. ``max_channels`` limits the width of cells, see ``cell_grid``; ``grid`` replaces its
    choice. ``tp_size`` is SGLang's. The accuracy is measured with a model that computes in ``accuracy_dtype``; the
    gradients are computed as the model comes. ``sensitivity=False`` gives all tokens the same scale. ``grid`` and
    ``sensitivity`` are for experiments."""

    num_context: int = 1024
    max_channels: int = 1536
    tp_size: int = 1
    accuracy_dtype: torch.dtype = torch.float32
    grid: CellGrid | None = None
    seed: int = 0
    sensitivity: bool = True


Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Wraps a loop to report its progress. Arguments: the steps, their number, and the name of the work."""


def calibrate_model(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    rope: Rope | None,
    describe: Calibration,
    options: CalibrationOptions,
    progress: Progress = lambda steps, total, what: steps,
) -> Profile:
    """Return the profile of a model.

    ``windows``: ``(tokens,)`` each: ``options.num_context`` tokens of context, then the continuation. The curve is
    measured on a fifth of the windows, at least one, which the fit does not see. ``model`` then computes in
    ``options.accuracy_dtype``.

    Raises ConfigError for too little text, values that are not finite, or a KL divergence that does not grow.
    """
    num_held_out = max(1, len(windows) // 5)
    fitted, held_out = windows[num_held_out:], windows[:num_held_out]
    if not fitted:
        raise ConfigError("calibration needs at least two windows of text")
    if options.num_context <= MOST_SINKS:
        raise ConfigError(f"calibration needs more than {MOST_SINKS} tokens of context")
    head_channels = model.k_head_dim + model.v_head_dim
    grid = options.grid or cell_grid(
        model.num_layers, model.num_heads, head_channels, options.max_channels, options.tp_size
    )
    moments = Moments(grid, model.k_head_dim, model.v_head_dim)
    generator = torch.Generator().manual_seed(options.seed)
    sample_tokens = max(1, _SAMPLE_BYTES // (2 * grid.num_layers * grid.num_heads * head_channels * len(fitted)))
    for window in progress(fitted, len(fitted), "sensitivity"):
        gather_window(model, window, options.num_context, rope, moments, generator, sample_tokens)
    _require_usable(moments)
    unit = math.sqrt(_UNIT_KL * 24 / (sum(x.numel() for x in moments.first.values()) * options.num_context))
    sample = _joined_samples(moments)
    keys = progress(grid.cells(), len(grid.cells()), "fit")
    cells = {key: _cell(moments, sample, key, unit, options) for key in keys}
    profile = Profile(
        grid=grid,
        k_head_dim=model.k_head_dim,
        v_head_dim=model.v_head_dim,
        cells=cells,
        rope=rope,
        num_sinks=moments.num_sinks,
        curve=(MeasuredStep(_STEPS[0], _STEPS[0], 8.0), MeasuredStep(_STEPS[-1], _STEPS[-1], 0.0)),  # a placeholder
        context_kl=1.0,
        calibration=describe,
    )
    del moments, sample, cells
    model.compute_in(options.accuracy_dtype)
    return measure_curve(model, profile, held_out, options.num_context, progress)


def cell_grid(num_layers: int, num_heads: int, head_channels: int, max_channels: int, tp_size: int) -> CellGrid:
    """Return the cells of a model. They are as wide as ``max_channels`` allows: wider cells need fewer bits
    (docs/codec.md).

    A cell holds K and V of three layers (raw values use one colour plane a layer) and as many of a rank's heads as fit,
    at least one. If all heads of a rank fit, the cell takes more layers, three at a time. ``head_channels``: channels
    of K and V together, in one head of one layer.
    """
    heads_per_rank = max(1, num_heads // tp_size)
    fits = max_channels // (3 * head_channels)
    heads = max((n for n in range(1, heads_per_rank + 1) if heads_per_rank % n == 0 and n <= fits), default=1)
    layers = 3
    if heads == heads_per_rank:
        layers = max(3, min(max_channels // (heads * head_channels), num_layers, _MOST_LAYERS) // 3 * 3)
    return CellGrid(num_layers, num_heads, layers, heads)


def _require_usable(moments: Moments) -> None:
    """Raise ConfigError if no transform can be derived from ``moments``."""
    finite = all(bool(torch.isfinite(x).all()) for x in moments.second.values())
    for tensor, fisher in zip(TENSORS, (moments.k_fisher, moments.v_fisher), strict=True):
        if not finite or not bool(torch.isfinite(fisher).all()):
            raise ConfigError(f"values or gradients of {tensor.upper()} are not finite; does the model overflow?")
        if not bool(fisher.any()):
            raise ConfigError(f"the model's output does not depend on {tensor.upper()}: is this a trained model?")


def _joined_samples(moments: Moments) -> tuple[CellValues, CellValues]:
    values, costs = zip(*moments.samples, strict=True)
    return tuple(CellValues(*map(torch.cat, zip(*each, strict=True))) for each in (values, costs))  # type: ignore[return-value]


def _cell(
    moments: Moments,
    sample: tuple[CellValues, CellValues],
    key: tuple[int, int],
    unit: float,
    options: CalibrationOptions,
) -> CellProfile:
    """Fit one cell's transform for a step of 1. A uniform error of one step has the variance 1 / 12; it costs half of
    that in every coefficient of every token of the context."""
    grid = moments.grid
    layers, heads = grid.layers(key[0]), grid.heads(key[1])
    transform = transform_of(moments.covariance(key), moments.information(key))
    inverse = (transform.inverse * unit).to(torch.bfloat16)
    weights = [(w / unit**2).float() for w in transform.weights]
    mean, spread = moments.mean(key).float(), (transform.variances.sqrt() / unit).float()

    values, costs = sample
    x = channels_of(values, grid, *key).float()
    coefficients = (x - mean) @ forward_of(inverse, weights)
    told_from = features(coefficients, spread, head_norms(values.cell(layers, heads)))
    sensitivity = torch.zeros(told_from.shape[1] + 1)
    if options.sensitivity:
        relative = _relative_costs(costs.cell(layers, heads), moments.usual_costs.cell(layers, heads))
        sensitivity = fit_log_cost(told_from, relative)
    scales = scales_of(exponents_of(log_cost(told_from, sensitivity)))
    scaled = coefficients.abs_().div_(scales[:, None])
    usual = scaled.kthvalue(math.ceil(_FEW_NEED_MORE * len(scaled)), dim=0).values
    order = usual.argsort(descending=True, stable=True)
    return CellProfile(
        inverse=inverse[order],
        k_weight=torch.stack(weights[: len(layers)]),
        v_weight=torch.stack(weights[len(layers) :]),
        mean=mean,
        spread=spread[order],
        reach=torch.stack((usual, scaled.amax(0)))[:, order],
        sensitivity=torch.cat((sensitivity[: len(order)][order], sensitivity[len(order) :])),
    )


def _relative_costs(costs: CellValues, usual: CellValues) -> torch.Tensor:
    """Return the mean cost of errors in each token of a cell, relative to the usual costs: ``(tokens,)`` float32."""
    ratios = [c / u.clamp_min(torch.finfo(torch.float64).tiny) for c, u in zip(costs, usual, strict=True)]
    return torch.stack(ratios).mean((0, 2, 3)).float()


def measure_curve(
    model: KVModel,
    profile: Profile,
    windows: Sequence[torch.Tensor],
    num_context: int,
    progress: Progress = lambda steps, total, what: steps,
) -> Profile:
    """Return the profile with its curve, the KL divergence and entropy at each step, measured on ``windows``, and with
    the value of the context to the model (``context_kl``)."""
    steps = (*_STEPS, math.inf)
    totals = torch.zeros((len(steps), 2), dtype=torch.float64)
    contexts = (_Context.of(model, window, num_context) for window in windows)
    runs = ((context, row) for context in contexts for row in range(len(steps)))
    for context, row in progress(runs, len(windows) * len(steps), "accuracy"):
        if math.isinf(steps[row]):
            values, bits = _forgotten(profile, context.values), 0.0
        else:
            values, bits = _there_and_back(KltQuantiser(profile, step=steps[row]), context.values)
        totals[row] += torch.tensor([context.divergence(model, values), bits], dtype=torch.float64)
    rows = (totals / len(windows)).tolist()
    curve = [MeasuredStep(step, kl, bits) for step, (kl, bits) in zip(_STEPS, rows, strict=False)]
    rising = [p for i, p in enumerate(curve) if p.kl > max((0.0, *(q.kl for q in curve[:i])))]
    if len(rising) < 2 or rows[-1][0] <= 0:
        raise ConfigError("the KL divergence does not grow with the step: is the model trained?")
    return replace(profile, curve=tuple(rising), context_kl=rows[-1][0])


@dataclass(frozen=True)
class _Context:
    """A context's KV, the tokens that follow it, and the log probabilities that the model gives after that KV."""

    values: CellValues
    continuation: torch.Tensor
    expected: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: KVModel, window: torch.Tensor, num_context: int) -> _Context:
        values = CellValues(*(x.to(torch.bfloat16).cpu() for x in model.kv(window[:num_context])))
        return cls(values, window[num_context:], model.log_probabilities(*values, window[num_context:]))

    @torch.no_grad()
    def divergence(self, model: KVModel, restored: CellValues) -> float:
        """Return the KL divergence of the model's predictions after ``restored``, in nats a token."""
        log_p = model.log_probabilities(*restored, self.continuation)
        pairs = zip(*(torch.split(x, _ROWS_AT_ONCE) for x in (self.expected, log_p)), strict=True)
        return sum(float((p.exp() * (p - q)).sum()) for p, q in pairs) / len(log_p)


def _there_and_back(quantiser: KltQuantiser, values: CellValues) -> tuple[CellValues, float]:
    """Quantise and restore a context's KV. Return the result and the entropy of its integers, in bits a value."""
    bits: list[float] = []

    def restore(cell: CellValues, place: CellPlace) -> CellValues:
        quantised = quantiser.quantise(cell, place)
        bits.append(_entropy_bits(quantised[-1]))
        return quantiser.dequantise(quantised, cell.k.dtype, place)

    restored = _by_cells(quantiser.profile.grid, values, restore)
    return restored, sum(bits) / sum(x.numel() for x in values)


def _forgotten(profile: Profile, values: CellValues) -> CellValues:
    """Return a context's KV with all tokens but the sinks replaced by the mean."""
    quantiser = KltQuantiser(profile, step=_STEPS[-1])
    means = _by_cells(profile.grid, values, lambda cell, place: quantiser.mean_values(place, cell.k.dtype))
    sinks = profile.num_sinks
    return CellValues(*(torch.cat((x[:sinks], mean[sinks:])) for x, mean in zip(values, means, strict=True)))


def _by_cells(grid: CellGrid, values: CellValues, restore: Callable[[CellValues, CellPlace], CellValues]) -> CellValues:
    """Return a context's KV as ``restore`` returns it for each cell."""
    restored = CellValues(*map(torch.empty_like, values))
    for key in grid.cells():
        place = CellPlace(grid.layers(key[0]), grid.heads(key[1]), range(len(values.k)))
        back = restore(values.cell(place.layers, place.heads), place)
        for whole, part in zip(restored.cell(place.layers, place.heads), back, strict=True):
            whole.copy_(part)
    return restored


def _entropy_bits(integers: torch.Tensor) -> float:
    """Return the order-0 entropy of uint8 ``(coefficients, tokens)``, in bits. Each coefficient has its own
    distribution."""
    x = integers.long()
    num_coefficients, num_tokens = x.shape
    cells = torch.bincount((x + 256 * torch.arange(num_coefficients)[:, None]).flatten())
    p = cells[cells > 0].double() / num_tokens
    return float(-(p * p.log2()).sum() * num_tokens)


class Transform(NamedTuple):
    """The transform of a cell, all float64. ``inverse``: ``(C, C)``; row c is what one unit of coefficient c adds to
    the channels. ``weights``: the blocks of W, ``(n, n)`` each, along its diagonal. ``variances``: ``(C,)``, of the
    coefficients, in descending order."""

    inverse: torch.Tensor
    weights: list[torch.Tensor]
    variances: torch.Tensor


def transform_of(covariance: torch.Tensor, information: Sequence[torch.Tensor]) -> Transform:
    """Return the transform of a cell.

    With R the root of W and B the eigenvectors, the inverse transform (coefficients to channels) is B^T R^-1, and the
    forward transform is R B = W inverse^T. So only eigenvalues need to be inverted. An error of one unit in any
    coefficient costs KL = 1/2.

    ``covariance``: ``(C, C)`` float64. ``information``: float64 ``(n, n)``, blocks along the diagonal; their sizes sum
    to C.
    """
    weights = _weights(information)
    roots, inverse_roots = [], []
    for weight in weights:
        values, vectors = torch.linalg.eigh(weight)
        roots.append((vectors * values.sqrt()) @ vectors.T)
        inverse_roots.append((vectors / values.sqrt()) @ vectors.T)
    sizes = [len(weight) for weight in weights]
    rows = torch.cat([r @ part for r, part in zip(roots, torch.split(covariance, sizes), strict=True)])
    weighted = torch.cat([part @ r for r, part in zip(roots, torch.split(rows, sizes, dim=1), strict=True)], dim=1)
    variances, basis = torch.linalg.eigh((weighted + weighted.T) / 2)
    basis = basis.flip(1)
    inverse = torch.cat([part.T @ r for r, part in zip(inverse_roots, torch.split(basis, sizes), strict=True)], dim=1)
    return Transform(inverse, weights, variances.flip(0).clamp_min(0))


def _weights(information: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the information made robust: every direction has a minimum weight, and the diagonal counts for more."""
    means = [block.diagonal().mean() for block in information]
    least = _BLOCK_FLOOR * torch.stack(means).mean()
    weights = []
    for block, mean in zip(information, means, strict=True):
        diagonal = _DIAGONAL_SHARE * block.diagonal() + _FLOOR * mean.clamp_min(least)
        weights.append((1 - _DIAGONAL_SHARE) * block + torch.diag(diagonal))
    return weights
