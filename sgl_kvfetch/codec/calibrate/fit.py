"""Calibrate a model: gather its moments, fit each cell's transform, and measure the accuracy and size at each step.

The windows pass the model's layers twice. In the first pass, the cells of a layer group are fitted as soon as its last
layer has been passed, and its moments are forgotten: a cell's fit needs nothing of other groups. The second pass
measures the profile. It cannot be part of the first: the layers of a cell are restored together, so all of them must
have been passed before the first one can be measured, and the number of sinks follows from the mean over all layers.

So memory holds, of all layers, only their part of the profile and the held-out contexts' K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sgl_kvfetch.codec.calibrate.curve import HeldOut, Progress, measure_contexts, placeholder, silent
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.calibrate.statistics import MOST_SINKS, HeadCosts, Moments, channels_of, count_sinks
from sgl_kvfetch.codec.calibrate.sweep import Sweep
from sgl_kvfetch.codec.calibrate.transform import transform_of
from sgl_kvfetch.codec.calibrate.unfinished import Unfinished
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import exponents_of, forward_of, head_norms, scales_of
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.profile import DEFAULT_SHARE, UNIT_KL, Calibration, CellProfile, Profile
from sgl_kvfetch.codec.quant.sensitivity import features, fit_log_cost, log_cost
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import TENSORS, CellGrid

_MOST_LAYERS = 12  # in one cell: the restore kernel is unrolled over them
_FEW_NEED_MORE = 0.99  # a coefficient that is zero in this fraction of the tokens is left out


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Settings of a calibration. ``max_channels`` limits the width of cells, see ``cell_grid``; ``grid`` replaces its
    choice. ``tp_size`` is SGLang's. ``sensitivity=False`` gives all tokens the same scale. ``grid`` and ``sensitivity``
    are for experiments."""

    num_context: int = 1024
    max_channels: int = 1536
    tp_size: int = 1
    grid: CellGrid | None = None
    seed: int = 0
    sensitivity: bool = True


def calibrate_model(
    model: LayeredModel,
    windows: Sequence[torch.Tensor],
    layers: LayerMap,
    describe: Calibration,
    options: CalibrationOptions,
    progress: Progress = silent,
    unfinished: Path | None = None,
) -> Profile:
    """Return the profile of a model. ``layers``: its map.

    ``windows``: ``(tokens,)`` each: ``options.num_context`` tokens of context, then the continuation. The curve is
    measured on a fifth of the windows, at least one, which the fit does not see.
    ``unfinished``: a file that keeps what is done of the first pass over the layers, most of the work. If a calibration
    of the same things left it, it goes on from there.

    Raises ConfigError for too little text, values that are not finite, a KL divergence that does not grow, or a default
    target that no step reaches.
    """
    num_held_out = max(1, len(windows) // 5)
    fitted, held_out = windows[num_held_out:], windows[:num_held_out]
    if not fitted:
        raise ConfigError("calibration needs at least two windows of text")
    if options.num_context <= MOST_SINKS:
        raise ConfigError(f"calibration needs more than {MOST_SINKS} tokens of context")
    dims = model.k_head_dim, model.v_head_dim
    grid = options.grid or cell_grid(
        len(layers.coded), model.num_heads, sum(dims), options.max_channels, options.tp_size
    )
    save = Unfinished(unfinished, [describe, options, windows, layers]) if unfinished else None
    sweep = Sweep(model, fitted, held_out, options.num_context, layers, grid, options.seed)
    num_channels = len(layers.coded) * model.num_heads * sum(dims)
    fit = _Fit(math.sqrt(UNIT_KL * 24 / (num_channels * options.num_context)), options)
    _pass_all(sweep, fit, model.num_layers, progress, save)
    contexts = [HeldOut(*each) for each in zip(sweep.contexts, sweep.others, strict=True)]
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
    profile = measure_contexts(model, profile, contexts, [w[options.num_context :] for w in held_out], progress)
    _require_default_target(profile)
    if save:
        save.remove()
    return profile


def _require_default_target(profile: Profile) -> None:
    """Raise ConfigError if the finest step costs more than servers ask for by default: they would break the answers."""
    finest, default = profile.curve[0], DEFAULT_SHARE * profile.context_kl
    if finest.kl > default:
        raise ConfigError(
            f"no profile: the finest step that changes predictions, {finest.step:.3g}, costs {finest.kl:.2g} nats a "
            f"token on held-out windows, expected at most {default:.2g}, the default target_kl (which is "
            f"{DEFAULT_SHARE:g} of what losing the context costs); calibrate on more text like your traffic, or serve "
            "this model with 'exact'"
        )


class _Fit:
    """The cells that are fitted, and what else the profile needs of their layers."""

    def __init__(self, unit: float, options: CalibrationOptions) -> None:
        """``unit``: what a step of 1 stands for."""
        self._unit, self._options = unit, options
        self.cells: dict[tuple[int, int], CellProfile] = {}
        self._costs: list[HeadCosts] = []  # of each layer group

    def add(self, moments: Moments) -> None:
        """Fit the cells of a layer group. Groups come in order. Raises ConfigError for values that are not finite."""
        _require_finite(moments)
        self._costs.append(moments.head_costs)
        for block in range(moments.grid.num_head_blocks):
            self.cells[moments.group, block] = _cell(moments, block, self._unit, self._options)

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


def _cell(moments: Moments, block: int, unit: float, options: CalibrationOptions) -> CellProfile:
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
    sensitivity = torch.zeros(told_from.shape[1] + 1)
    if options.sensitivity:
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
