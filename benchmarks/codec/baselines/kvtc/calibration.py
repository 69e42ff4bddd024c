"""Fits KVTC to a model, once: the components of K and of V, and the groups for each ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.codec.baselines.kvtc.allocation import allocate, measure_errors
from benchmarks.codec.baselines.kvtc.components import Components, principal_components
from benchmarks.codec.baselines.kvtc.groups import Group
from benchmarks.codec.baselines.rotation import only_rope
from benchmarks.codec.kv_model import KVModel
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import TENSORS, TensorName

SINK_TOKENS = 4
_VALUE_BITS = 16  # ratios are relative to this
_ALLOCATION_TOKENS = 256
_SAMPLE_BYTES = 1 << 30  # for K, and as many for V


@dataclass(frozen=True, slots=True)
class TensorFit:
    """components: those of one token's values in all layers and heads. groups: for each ratio."""

    components: Components
    groups: Mapping[int, tuple[Group, ...]]


@dataclass(frozen=True, slots=True)
class Fit:
    rope: Rope
    tensors: Mapping[TensorName, TensorFit]


def calibrate(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    ratios: Sequence[int],
    on_step: Callable[[str], None] = lambda what: None,
) -> Fit:
    """Fit to the K and V of ``windows``, ``(tokens,)`` ids each, without their first tokens, the sinks. If the tokens
    do not fit into ``_SAMPLE_BYTES``, an evenly spread sample is used.

    ``on_step`` is called before each step: one per window, and two each for K and V. Raises ConfigError if the windows
    hold only sinks, UnsupportedError if the model's rotation of K is not known.
    """
    rope = only_rope(LayeredModel(model.path, device=model.device))
    samples = _samples(model, windows, rope, on_step)
    tensors: dict[TensorName, TensorFit] = {}
    for tensor in TENSORS:
        values = samples.pop(tensor)
        on_step(f"components of {tensor.upper()}")
        components = principal_components(values)
        on_step(f"bits of {tensor.upper()}")
        every = -(-len(values) // _ALLOCATION_TOKENS)
        sample = values[::every] @ components.basis  # ``principal_components`` has centred the values
        num_values = values.shape[1]
        groups = allocate(measure_errors(sample.cpu()), [_VALUE_BITS * num_values // ratio for ratio in ratios])
        tensors[tensor] = TensorFit(components, dict(zip(ratios, groups, strict=True)))
    return Fit(rope, tensors)


def _samples(
    model: KVModel, windows: Sequence[torch.Tensor], rope: Rope, on_step: Callable[[str], None]
) -> dict[TensorName, torch.Tensor]:
    """Return float32 ``(tokens, layers * heads * dim)``, K without its rotation."""
    dims: dict[TensorName, int] = {"k": model.k_head_dim, "v": model.v_head_dim}
    num_heads = model.num_layers * model.num_heads
    token_bytes = num_heads * max(dims.values()) * torch.float32.itemsize
    kept = sampled_tokens([len(window) for window in windows], _SAMPLE_BYTES // token_bytes)
    samples = {tensor: torch.empty(sum(map(len, kept)), num_heads * dim) for tensor, dim in dims.items()}
    end = 0
    for window, tokens in zip(windows, kept, strict=True):
        on_step("values")
        k, v = (x.float().cpu() for x in model.kv(window))
        first, end = end, end + len(tokens)
        which = slice(tokens.start, tokens.stop, tokens.step)
        samples["k"][first:end] = flatten_k(k, 0, rope)[which]
        samples["v"][first:end] = v.flatten(1)[which]
    return samples


def sampled_tokens(lengths: Sequence[int], most: int) -> list[range]:
    """Return the tokens to use from windows of these lengths: no sinks, about ``most`` in total, evenly spread.

    Raises ConfigError if the windows have only sinks.
    """
    total = sum(max(0, length - SINK_TOKENS) for length in lengths)
    if not total:
        raise ConfigError(f"KVTC calibrates on tokens after the first {SINK_TOKENS}, but the windows have none")
    every = -(-total // max(1, most))
    return [range(SINK_TOKENS, length, every) for length in lengths]


def flatten_k(k: torch.Tensor, first_token: int, rope: Rope) -> torch.Tensor:
    """Remove K's rotation, and return feature vectors ``(tokens, layers * heads * dim)``. ``k``: float32 ``(tokens,
    layers, heads, dim)``, for the tokens from ``first_token`` on."""
    return unrotate(k, rope.table(first_token, len(k)), rope).flatten(1)


def unflatten_k(vectors: torch.Tensor, shape: Sequence[int], first_token: int, rope: Rope) -> torch.Tensor:
    """Invert ``flatten_k``, up to rounding. ``shape``: ``(tokens, layers, heads, dim)``."""
    return rotate(vectors.view(*shape), rope.table(first_token, len(vectors)), rope)
