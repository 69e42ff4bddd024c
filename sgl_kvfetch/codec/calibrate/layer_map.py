"""Make a model's layer map: which pool of SGLang has what a layer keeps, its window, and the rotation of its keys.

Rotations are found in the keys themselves. Keys of one repeated token, each of which a layer gets with the same hidden
state, differ by their rotation alone (``model.probe``). So the right rotation is the one without which all these keys
are equal, and a layer whose keys are equal as they are has none. A factor of the rotation, such as YaRN's, is not told
apart from the keys themselves, and need not be.

A wrong rotation costs bits, and nothing else: what a writer turns back, a reader turns forward by the same table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from sgl_kvfetch.codec.calibrate.layers import LayeredModel, type_of
from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer, Pool
from sgl_kvfetch.codec.quant.rope import Rope, unrotate

# A share of a key's length. On SmolLM2-135M, rounding to bfloat16 errs by at most 0.003, wrong pairs by 0.15 or more.
_MOST_ROPE_ERROR = 0.05

# SGLang and transformers compute these alike. "longrope" they do up to the length that the model was trained for first:
# behind it, SGLang takes other frequencies or not, by the other prompts of a batch, so K is larger there.
_SAME_IN_SGLANG = ("default", "linear", "llama3", "yarn", "proportional", "longrope")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class _Found(NamedTuple):
    rope: Rope | None
    problem: str = ""  # why K stays rotated


def map_layers(model: LayeredModel) -> tuple[LayerMap, tuple[str, ...]]:
    """Return a model's layer map, and notes for its profile: which layers' keys stay rotated, and why."""
    found = _of_one_kind({number: _rotation(model, number) for number in model.probe})
    ropes = tuple(dict.fromkeys(x.rope for x in found.values() if x.rope is not None))
    layers = []
    for number, pool in enumerate(model.pools):
        rope = found[number].rope if number in found else None
        window = _window(model.config, number) if pool in (Pool.KV, Pool.WINDOW) else None
        layers.append(ModelLayer(pool=pool, window=window, rotation=None if rope is None else ropes.index(rope)))
    notes = []
    for problem in dict.fromkeys(x.problem for x in found.values() if x.problem):
        names = model.names_of([number for number, x in found.items() if x.problem == problem])
        notes.append(f"K of {names} stays rotated, which costs bits: {problem}")
    return LayerMap(layers=tuple(layers), rotations=ropes), tuple(notes)


def _rotation(model: LayeredModel, layer: int) -> _Found:
    """Return the rotation that SGLang applies to a layer's keys."""
    k = model.probe[layer]
    parameters = _rope_parameters(model.config, layer)
    errors = {rope: _error(k, rope) for rope in (None, *_candidates(model, k.shape[-1]))}
    best = min(errors, key=lambda rope: errors[rope])
    if errors[best] >= _MOST_ROPE_ERROR:
        return _Found(None, "no rotation by the model's frequencies explains its keys")
    if best is None:
        return _Found(None)
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "dynamic":
        return _Found(best if "alpha" in parameters else _stretched(best, parameters))
    if rope_type not in _SAME_IN_SGLANG:
        known = ", ".join(_SAME_IN_SGLANG)
        return _Found(None, f"rope type {rope_type!r} is not known; known are {known}")
    return _Found(best)


def _stretched(rope: Rope, parameters: Mapping[str, Any]) -> Rope:
    """Return SGLang's rotation of the type "dynamic": that of prompts ``factor`` times the model's length, for all
    prompts (``DynamicNTKScalingRotaryEmbedding``). transformers stretches by each prompt's length."""
    dim, factor = rope.rotary_dim, parameters["factor"]
    base = parameters["rope_theta"] * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    frequencies = 1 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return msgspec.structs.replace(rope, inv_freq=tuple(frequencies.tolist()))


def _candidates(model: LayeredModel, dim: int) -> Iterator[Rope]:
    for frequencies in model.inverse_frequencies():
        if 2 * len(frequencies) <= dim:
            for interleaved in (False, True):
                yield Rope(inv_freq=tuple(frequencies.float().tolist()), interleaved=interleaved)


def _error(k: torch.Tensor, rope: Rope | None) -> float:
    """Return how much keys of a layer, ``(tokens, heads, dim)``, differ without a rotation, as a share of a length."""
    plain = k if rope is None else unrotate(k, rope.table(0, len(k), k.device), rope)
    return float(((plain - plain[:1]).norm(dim=-1) / k[:1].norm(dim=-1)).max())


def _of_one_kind(found: dict[int, _Found]) -> dict[int, _Found]:
    """Leave only rotations that turn the same pairs of channels: those that most layers have."""
    kinds = Counter((x.rope.rotary_dim, x.rope.interleaved) for x in found.values() if x.rope is not None)
    if len(kinds) < 2:
        return found
    usual = kinds.most_common(1)[0][0]
    return {
        number: x
        if x.rope is None or (x.rope.rotary_dim, x.rope.interleaved) == usual
        else _Found(None, f"most layers turn {usual[0]} channels, these turn {x.rope.rotary_dim}")
        for number, x in found.items()
    }


def _rope_parameters(config: Any, layer: int) -> Mapping[str, Any]:
    """Return the parameters of a layer's rotation, as its type has them or all layers do."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_type = parameters.get(type_of(config, layer))
    return of_type if isinstance(of_type, Mapping) else parameters


def _window(config: Any, layer: int) -> int | None:
    """Return how many tokens a layer attends to; None if all."""
    kind = type_of(config, layer)
    return getattr(config, _WINDOWS.get(kind, "" if kind else "sliding_window"), None) or None
