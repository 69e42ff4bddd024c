"""Calibrate a model: gather its moments, fit each cell's transform, and measure the accuracy and size at each step.

The windows pass the model's layers twice. In the first pass, the cells of a layer group are fitted as soon as its last
layer has been passed, and its moments are forgotten: a cell's fit needs nothing of other groups. The second pass
measures the profile. It cannot be part of the first: the layers of a cell are restored together, so all of them must
have been passed before the first one can be measured, and the number of sinks follows from the mean over all layers.

So memory holds, of all layers, only their part of the profile and the held-out contexts' K and V.

**A cell's transform** follows from how its channels vary and what errors in them cost. It is a Karhunen-Loeve transform
that weighs errors by their cost. Let S be the covariance of the cell's channels and W their weight: an error e costs
e^T W e / 2. In coordinates z = W^(1/2) x an error's cost is half its squared length, whatever its direction, so one
uniform step serves all coordinates (Gersho and Gray, *Vector Quantization and Signal Compression*, 1992, section 8.3).
Rotating them to the eigenvectors of the covariance there, W^(1/2) S W^(1/2), keeps the cost and minimises the sum of
the entropies (Goyal, "Theoretical foundations of transform coding", 2001). So layers, heads, channels and directions
that hardly matter are coarsely quantised without further rules.

Only the blocks of W within one layer's K or V are used: measured over blocks as wide as a cell, weights overfit the few
windows they are measured on (docs/codec.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_kvfetch.codec.calibrate.curve import HeldOut, Progress, measure_contexts, placeholder, silent
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.calibrate.sweep import (
    MOST_SINKS,
    HeadCosts,
    Moments,
    Sweep,
    Unfinished,
    channels_of,
    count_sinks,
)
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import (
    exponents_of,
    features,
    fit_log_cost,
    forward_of,
    head_norms,
    log_cost,
    scales_of,
)
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.profile import DEFAULT_SHARE, UNIT_KL, Calibration, CellProfile, Profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import TENSORS, CellGrid

# The share of the weight that uses only the diagonal of what was measured: entries off the diagonal are known less
# well. From 0.1 to 0.7 makes little difference on text of the calibration's kind; on other text 0.3 saves 5%.
_DIAGONAL_SHARE = 0.3

# Directions that do not matter in this little text may matter elsewhere: no weight is below this share of the mean.
_FLOOR = 0.05

# No block weighs less than this share of the mean block: a block that the output does not depend on, such as a pruned
# head, still needs a transform.
_BLOCK_FLOOR = 1e-6


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
    weights = robust_weights(information)
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


def robust_weights(information: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the information made robust: every direction has a minimum weight, and the diagonal counts for more."""
    means = [block.diagonal().mean() for block in information]
    least = _BLOCK_FLOOR * torch.stack(means).mean()
    weights = []
    for block, mean in zip(information, means, strict=True):
        diagonal = _DIAGONAL_SHARE * block.diagonal() + _FLOOR * mean.clamp_min(least)
        weights.append((1 - _DIAGONAL_SHARE) * block + torch.diag(diagonal))
    return weights


_MOST_LAYERS = 12  # in one cell: the restore kernel is unrolled over them
_FEW_NEED_MORE = 0.99  # a coefficient that is zero in this fraction of the tokens is left out


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Settings of a calibration. ``max_channels`` limits the width of cells, see ``cell_grid``; ``grid`` replaces its
    choice. ``tp_size`` is SGLang's. ``worst_of``: the kinds of text whose worst the curve is of; empty for all."""

    num_context: int = 1024
    max_channels: int = 1536
    tp_size: int = 1
    grid: CellGrid | None = None
    seed: int = 0
    worst_of: tuple[str, ...] = ()


def calibrate_model(
    model: LayeredModel,
    windows: Mapping[str, Sequence[torch.Tensor]],
    layers: LayerMap,
    describe: Calibration,
    options: CalibrationOptions,
    progress: Progress = silent,
    unfinished: Path | None = None,
) -> Profile:
    """Return the profile of a model. ``layers``: its map.

    ``windows``: by kind of text, ``(tokens,)`` each: ``options.num_context`` tokens of context, then the continuation.
    The curve is measured on a fifth of each kind's windows, at least one, which the fit does not see.
    ``unfinished``: a file that keeps what is done of the first pass over the layers, most of the work. If a calibration
    of the same things left it, it goes on from there.

    Raises ConfigError for too little text, values that are not finite, a KL divergence that does not grow, or a default
    target that no step reaches.
    """
    fitted: list[torch.Tensor] = []
    held_out: list[torch.Tensor] = []
    kinds: list[str] = []  # of those that are held out
    for kind, of_kind in windows.items():
        num_held_out = max(1, len(of_kind) // 5)
        if num_held_out == len(of_kind):
            raise ConfigError(f"calibration needs at least two windows of each kind of text, found one of {kind}")
        held_out += of_kind[:num_held_out]
        kinds += [kind] * num_held_out
        fitted += of_kind[num_held_out:]
    if unknown := {*options.worst_of} - {*windows}:
        raise ConfigError(f"the kinds of text {sorted(unknown)} are to count: expected some of {[*windows]}")
    if options.num_context <= MOST_SINKS:
        raise ConfigError(f"calibration needs more than {MOST_SINKS} tokens of context")
    dims = model.k_head_dim, model.v_head_dim
    grid = options.grid or cell_grid(
        len(layers.coded), model.num_heads, sum(dims), options.max_channels, options.tp_size
    )
    save = Unfinished(unfinished, [describe, options, kinds, held_out, fitted, layers]) if unfinished else None
    sweep = Sweep(model, fitted, held_out, options.num_context, layers, grid, options.seed)
    num_channels = len(layers.coded) * model.num_heads * sum(dims)
    fit = _Fit(math.sqrt(UNIT_KL * 24 / (num_channels * options.num_context)))
    _pass_all(sweep, fit, model.num_layers, progress, save)
    continuations = [window[options.num_context :] for window in held_out]
    contexts = [HeldOut(*each) for each in zip(sweep.contexts, sweep.others, continuations, kinds, strict=True)]
    del sweep
    profile = Profile(
        grid=grid,
        k_head_dim=model.k_head_dim,
        v_head_dim=model.v_head_dim,
        cells=fit.cells,
        layers=layers,
        num_sinks=fit.num_sinks(),
        curve=placeholder(),
        context_kl=1.0,
        calibration=describe,
    )
    num_windows = {kind: len(of_kind) for kind, of_kind in windows.items()}
    profile = measure_contexts(model, profile, contexts, num_windows, options.worst_of, progress)
    _require_default_target(profile)
    if save:
        save.remove()
    return profile


def _require_default_target(profile: Profile) -> None:
    """Raise ConfigError if the finest step costs more than servers ask for by default: they would break the answers."""
    finest, default = profile.mean_kls[0], DEFAULT_SHARE * profile.context_kl
    if finest > default:
        raise ConfigError(
            f"no profile: the finest step that changes predictions, {profile.curve[0].step:.3g}, costs {finest:.2g} "
            f"nats per token on held-out windows, expected at most {default:.2g}, which the default target_kl allows "
            f"({DEFAULT_SHARE:g} of what losing the context costs); calibrate on more text like your traffic, or serve "
            "this model with 'exact'"
        )


class _Fit:
    """The cells that are fitted, and what else the profile needs of their layers."""

    def __init__(self, unit: float) -> None:
        """``unit``: what a step of 1 stands for."""
        self._unit = unit
        self.cells: dict[tuple[int, int], CellProfile] = {}
        self._costs: list[HeadCosts] = []  # of each layer group

    def add(self, moments: Moments) -> None:
        """Fit the cells of a layer group. Groups come in order. Raises ConfigError for values that are not finite."""
        _require_finite(moments)
        self._costs.append(moments.head_costs)
        for block in range(moments.grid.num_head_blocks):
            self.cells[moments.group, block] = _cell(moments, block, self._unit)

    def num_sinks(self) -> int:
        """Return the number of attention sinks, once all groups are fitted. Raises ConfigError if errors cost nothing
        in any layer."""
        first, usual = zip(*self._costs, strict=True)
        costs = HeadCosts(torch.cat(first, dim=2), torch.cat(usual, dim=1))
        for tensor, of_tensor in zip(TENSORS, costs.usual, strict=True):
            if not bool(of_tensor.any()):
                raise ConfigError(f"the model's output does not depend on {tensor.upper()}: is this a trained model?")
        return count_sinks(costs)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        cells = {key: [getattr(cell, field.name) for field in fields(cell)] for key, cell in self.cells.items()}
        return {"cells": cells, "costs": [[*costs] for costs in self._costs]}

    def restore(self, state: dict[str, Any]) -> None:
        self.cells = {key: CellProfile(*tensors) for key, tensors in state["cells"].items()}
        self._costs = [HeadCosts(*costs) for costs in state["costs"]]


def _pass_all(sweep: Sweep, fit: _Fit, num_layers: int, progress: Progress, save: Unfinished | None) -> None:
    """Pass all layers, from where ``save`` left off, and fit their cells."""
    first, state = 0, save.read() if save else None
    if state:
        first = sweep.restore(state["sweep"])
        fit.restore(state["fit"])
    for layer in progress(range(first, num_layers), num_layers - first, "sensitivity"):
        moments = sweep.pass_layer(layer)
        if moments:
            fit.add(moments)
        del moments
        if save and save.is_due():
            save.write({"sweep": sweep.state(layer + 1), "fit": fit.state()})


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


def _require_finite(moments: Moments) -> None:
    """Raise ConfigError if no transform can be derived from ``moments``."""
    finite = bool(torch.isfinite(moments.second).all())
    for tensor, weights in zip(TENSORS, moments.weights, strict=True):
        if not finite or not bool(torch.isfinite(weights).all()):
            raise ConfigError(f"values or gradients of {tensor.upper()} are not finite; does the model overflow?")


def _cell(moments: Moments, block: int, unit: float) -> CellProfile:
    """Fit one cell's transform for a step of 1. A uniform error of one step has the variance 1 / 12; it costs half of
    that in every coefficient of every token of the context."""
    grid, heads = moments.grid, moments.grid.heads(block)
    layers = range(len(grid.layers(moments.group)))
    transform = transform_of(moments.covariance(block), moments.weights_of(block))
    inverse = (transform.inverse * unit).to(torch.bfloat16)
    weights = [(w / unit**2).float() for w in transform.weights]
    mean, spread = moments.mean(block).float(), (transform.variances.sqrt() / unit).float()

    x = channels_of(moments.values, grid, block).float()
    coefficients = (x - mean) @ forward_of(inverse, weights)
    told_from = features(coefficients, spread, head_norms(moments.values.cell(layers, heads)))
    relative = _relative_costs(moments.costs.cell(layers, heads), moments.usual_costs.cell(layers, heads))
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
