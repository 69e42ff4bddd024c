"""Calibrate a model: gather its moments, make its transform, and measure what the steps cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sgl_kvfetch.calibrate.model import KVModel
from sgl_kvfetch.calibrate.statistics import BlockMoments, block_heads, gather
from sgl_kvfetch.calibrate.transform import Weights, inverse_transform
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.quant.klt import ZERO, KltQuantiser
from sgl_kvfetch.quant.profile import Calibration, CurvePoint, Profile
from sgl_kvfetch.quant.rope import Rope
from sgl_kvfetch.types import TENSORS, TensorName

# A step of 1 is meant to cost so much: what the Fisher information foretells for fine steps.
_UNIT_KL = 1e-4
_STEPS = tuple(2.0 ** (half / 2) for half in range(-6, 7))


@dataclass(frozen=True, slots=True)
class Options:
    """``max_block_channels`` and ``tp_size`` bound the blocks: see ``block_heads``. The last two are there to measure
    what each idea brings (``benchmarks.codec``)."""

    num_context: int = 1024
    max_block_channels: int = 256
    tp_size: int = 1
    seed: int = 0
    weights: Weights = "matrix"
    decorrelate: bool = True


def calibrate(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    rope: Rope | None,
    describe: Calibration,
    options: Options,
    progress: Callable[[Iterator[int], int, str], Iterator[int]] = lambda steps, total, what: steps,
) -> Profile:
    """``windows``: ``(tokens,)`` each, ``options.num_context`` of context and the rest of continuation. A fifth of them
    (one or more) is kept apart, to measure the curve on.

    ``progress`` wraps the loops: given their steps, how many, and what they do. Raises ConfigError where the text is
    too little, the model's numbers are not finite, or its divergence does not grow with the step.
    """
    num_held_out = max(1, len(windows) // 5)
    fitted, held_out = windows[num_held_out:], windows[:num_held_out]
    if not fitted:
        raise ConfigError("calibration needs two windows of text or more")
    moments = _gather_all(model, fitted, rope, options, progress)
    _require_usable(moments)
    num_coefficients = sum(m.first.numel() for m in moments.values()) * options.num_context
    inverse = {tensor: _unit_steps(m, options, num_coefficients) for tensor, m in moments.items()}
    profile = Profile(
        inverse={tensor: x.to(torch.bfloat16) for tensor, x in inverse.items()},
        spread={tensor: _spread(x, moments[tensor].covariance) for tensor, x in inverse.items()},
        mean={t: moments[t].mean.view(model.num_layers, model.num_heads, -1).float() for t in TENSORS},
        rope=rope,
        curve=(CurvePoint(_STEPS[0], _STEPS[0], 8.0), CurvePoint(_STEPS[-1], _STEPS[-1], 0.0)),  # until it is measured
        calibration=describe,
        tiling=dict.fromkeys(TENSORS),
    )
    return measure_curve(model, profile, held_out, options.num_context, progress)


def _gather_all(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    rope: Rope | None,
    options: Options,
    progress: Callable[[Iterator[int], int, str], Iterator[int]],
) -> dict[TensorName, BlockMoments]:
    dims: dict[TensorName, int] = {"k": model.k_head_dim, "v": model.v_head_dim}
    moments: dict[TensorName, BlockMoments] = {}
    for tensor, dim in dims.items():
        heads = block_heads(model.num_heads, dim, options.max_block_channels, options.tp_size)
        moments[tensor] = BlockMoments.zeros(model.num_layers, model.num_heads // heads, heads * dim)
    generator = torch.Generator().manual_seed(options.seed)
    for i in progress(iter(range(len(windows))), len(windows), "sensitivity"):
        gather(model, windows[i], options.num_context, rope, moments, generator)
    return moments


def _require_usable(moments: Mapping[TensorName, BlockMoments]) -> None:
    """Raises ConfigError for what no transform can be made from."""
    for tensor, m in moments.items():
        if not all(bool(torch.isfinite(x).all()) for x in (m.covariance, m.information)):
            raise ConfigError(f"values or gradients of {tensor.upper()} are not finite; does the model overflow?")
        if not bool(m.information.any()):
            raise ConfigError(f"what the model says does not depend on {tensor.upper()}: is this a trained model?")


def _unit_steps(moments: BlockMoments, options: Options, num_coefficients: int) -> torch.Tensor:
    inverse = inverse_transform(
        moments.covariance, moments.information, weights=options.weights, decorrelate=options.decorrelate
    )
    # A uniform error of one step has the variance step^2 / 12 and costs half of that: in every coefficient, of K and of
    # V, of each of the context's tokens.
    return inverse * math.sqrt(_UNIT_KL * 24 / num_coefficients)


def _spread(inverse: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Standard deviations of the coefficients, ``(layers, blocks, C)`` float32."""
    forward = torch.linalg.inv(inverse)
    variances: torch.Tensor = (forward.mT @ covariance @ forward).diagonal(dim1=-2, dim2=-1)
    return variances.clamp_min(0).sqrt().float()


def measure_curve(
    model: KVModel,
    profile: Profile,
    windows: Sequence[torch.Tensor],
    num_context: int,
    progress: Callable[[Iterator[int], int, str], Iterator[int]] = lambda steps, total, what: steps,
) -> Profile:
    """The profile with the KL divergence and the entropy that its steps are measured to have on ``windows``."""
    totals = torch.zeros((len(_STEPS), 2), dtype=torch.float64)
    for i in progress(iter(range(len(windows))), len(windows), "accuracy"):
        context, continuation = windows[i][:num_context], windows[i][num_context:]
        values = dict(zip(TENSORS, (x.to(torch.bfloat16) for x in model.kv(context)), strict=True))
        with torch.no_grad():
            exact = model.log_probabilities(values["k"], values["v"], continuation)
            for row, step in enumerate(_STEPS):
                quantiser = KltQuantiser(profile, step=step)
                bits = 0.0
                restored = {}
                for tensor in TENSORS:
                    quantised = quantiser.quantise(values[tensor], tensor, 0)
                    restored[tensor] = quantiser.dequantise(quantised, torch.bfloat16, tensor, 0)
                    bits += _entropy_bits(quantised.integers[0]) / len(TENSORS)
                log_p = model.log_probabilities(restored["k"], restored["v"], continuation)
                kl = (exact.exp() * (exact - log_p)).sum(-1).mean()
                totals[row] += torch.tensor([float(kl), bits], dtype=torch.float64)
    curve = [
        CurvePoint(step, *map(float, row)) for step, row in zip(_STEPS, (totals / len(windows)).tolist(), strict=True)
    ]
    rising = [p for i, p in enumerate(curve) if p.kl > max((q.kl for q in curve[:i]), default=0.0)]
    if len(rising) < 2:
        raise ConfigError("coarser steps do not cost more: is this a trained model, and text that it can read?")
    return replace(profile, curve=tuple(rising))


def _entropy_bits(integers: torch.Tensor) -> float:
    """Mean order-0 entropy of the coefficients, each with a distribution of its own. ``(tokens, layers, heads, dim)``
    uint8."""
    x = integers.flatten(1).long()
    num_tokens, num_coefficients = x.shape
    cells = torch.bincount((x + 2 * ZERO * torch.arange(num_coefficients, device=x.device)).flatten())
    p = cells[cells > 0].double() / num_tokens
    return float(-(p * p.log2()).sum() / num_coefficients)
