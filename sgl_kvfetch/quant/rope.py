"""Rotary position embedding, as the engine applies it: removed from K before quantisation, applied again after.

A rotated channel of K has no mean and a large spread; without the rotation, its spread is small. The rotation is read
from the model's config. It follows SGLang's ``srt/layers/rotary_embedding`` (its PyTorch code, with the same order of
operations), even where that differs from transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch

from sgl_kvfetch.errors import UnsupportedError


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """One rotation for all layers and heads of a model.

    Position p rotates pair i by ``p / position_divisor * inv_freq[i]`` and scales it by ``attention_scaling``.
    ``inv_freq`` has half the rotary dimension's entries, each a float32. ``interleaved``: pair i is channels
    ``(2i, 2i + 1)`` (GPT-J); otherwise ``(i, i + rotary_dim / 2)`` (NeoX). Channels from ``rotary_dim`` on are not
    rotated. Raises ValueError for invalid numbers.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    interleaved: bool = False
    position_divisor: float = 1.0  # not merged into inv_freq: float32 rounds p / d * f and p * (f / d) differently

    def __post_init__(self) -> None:
        if not self.inv_freq or not all(math.isfinite(f) for f in self.inv_freq):
            raise ValueError(f"inv_freq has {len(self.inv_freq)} entries; expected one or more, all finite")
        for name in ("attention_scaling", "position_divisor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value}: expected a finite number above 0")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    @property
    def frequencies(self) -> torch.Tensor:
        """Radians a position, float32 ``(rotary_dim / 2,)`` on the CPU."""
        return torch.tensor(self.inv_freq, dtype=torch.float32, device="cpu") / self.position_divisor

    @lru_cache(maxsize=64)  # noqa: B019 - there are few ropes, and all cells of a span need the same table
    def table(self, first_token: int, num_tokens: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return ``(tokens, rotary_dim)`` float32: cosines, then sines, of the positions from ``first_token`` on.

        These are rows of SGLang's ``cos_sin_cache``, including ``attention_scaling``.
        """
        positions = torch.arange(first_token, first_token + num_tokens, dtype=torch.float32, device=device)
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        angles = (positions / self.position_divisor)[:, None] * inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_scaling


def rotate(x: torch.Tensor, table: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate ``x``, float32 ``(tokens, ..., dim)``. ``table``: the rows of ``Rope.table`` for its tokens."""
    cos, sin = _factors(x, table)
    first, second = _pairs(x, rope)
    turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    return _joined(*turned, x, rope)


def unrotate(x: torch.Tensor, table: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Undo ``rotate``, up to rounding."""
    cos, sin = _factors(x, table / rope.attention_scaling**2)
    first, second = _pairs(x, rope)
    turned = (first * cos).addcmul_(second, sin), (second * cos).addcmul_(first, sin, value=-1)
    return _joined(*turned, x, rope)


def _factors(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, broadcast over all dimensions of ``x`` between tokens and channels."""
    assert table.shape[0] == x.shape[0], (table.shape, x.shape)
    cos, sin = table.view(x.shape[0], *[1] * (x.ndim - 2), -1).chunk(2, dim=-1)
    return cos, sin


def _pairs(x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    dim = rope.rotary_dim
    assert x.shape[-1] >= dim, (x.shape, dim)
    if rope.interleaved:
        return x[..., :dim:2], x[..., 1:dim:2]
    return x[..., : dim // 2], x[..., dim // 2 : dim]


def _joined(first: torch.Tensor, second: torch.Tensor, like: torch.Tensor, rope: Rope) -> torch.Tensor:
    rotated = torch.stack((first, second), -1).flatten(-2) if rope.interleaved else torch.cat((first, second), -1)
    return rotated if rope.rotary_dim == like.shape[-1] else torch.cat((rotated, like[..., rope.rotary_dim :]), -1)


@dataclass(frozen=True)
class _Family:
    """How SGLang's implementation of a model type (``srt/models``) uses its config.

    ``interleaved``: the negation of the ``is_neox_style`` it passes. ``obeys_style``: the config's
    ``rope_is_neox_style`` overrides that. ``partial``: the default of ``partial_rotary_factor``; None if it always
    rotates whole heads. ``says_dim``: the config may give the number of rotated channels. ``scaled``: whether it uses
    the RoPE type at all.
    """

    interleaved: bool = False
    obeys_style: bool = False
    partial: float | None = None
    says_dim: bool = False
    scaled: bool = True


_LLAMA = _Family(partial=1.0, obeys_style=True)
_WHOLE = _Family()
_PLAIN = _Family(scaled=False)

# Only models that rotate all layers alike, and K last. A single rotation would be wrong for others, such as cohere2 and
# smollm3 (layers without RoPE), gemma3 (two bases), hunyuan (normed after the rotation).
_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _LLAMA,
    "internlm3": _LLAMA,
    "arcee": _LLAMA,
    "apertus": _LLAMA,
    "exaone": _LLAMA,
    "granite": _Family(obeys_style=True),
    "qwen2": _WHOLE,
    "qwen3": _WHOLE,
    "qwen2_moe": _WHOLE,
    "qwen3_moe": _WHOLE,
    "internlm2": _WHOLE,
    "olmo2": _WHOLE,
    "olmoe": _WHOLE,
    "solar": _WHOLE,
    "gpt_oss": _WHOLE,
    "glm4_moe": _Family(partial=0.5),
    "mixtral": _PLAIN,
    "gemma": _PLAIN,
    "gemma2": _PLAIN,
    "granitemoe": _PLAIN,
    "olmo": _PLAIN,
    "starcoder2": _PLAIN,
    "phi": _Family(partial=0.5, scaled=False),
    "persimmon": _Family(partial=0.5, scaled=False),
    "stablelm": _Family(partial=0.25, scaled=False),
    "gptj": _Family(interleaved=True, says_dim=True, scaled=False),
    "cohere": _Family(interleaved=True),
    "glm4": _Family(interleaved=True, partial=0.5),
    "ernie4_5": _Family(interleaved=True, obeys_style=True),
    "ernie4_5_moe": _Family(interleaved=True, obeys_style=True),
}


def rope_of_config(config: Any) -> Rope:
    """Return the rotation of a model, from its transformers config: a ``PretrainedConfig``, or ``config.json`` as a
    mapping. Keys missing from a mapping get transformers' general defaults, not those of the model type.

    Raises UnsupportedError, listing the known ones, if the model type or the type of RoPE is unknown. Also raises it if
    SGLang and transformers would rotate differently.
    """
    get: _Get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    model_type = get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedError(
            f"model_type {model_type!r}: how it rotates K is not known; known are {', '.join(sorted(_FAMILIES))}"
        )
    parameters = _parameters(get)
    rope_type = _rope_type(parameters, get)
    if not family.scaled and rope_type != "default":
        raise UnsupportedError(f"rope type {rope_type!r} of model_type {model_type!r}: SGLang rotates it as 'default'")
    return _build(_Setting(get, parameters, rope_type, _rotary_dim(family, get, parameters)), _interleaved(family, get))


_Get = Callable[[str], Any]


@dataclass(frozen=True)
class _Setting:
    """A config's RoPE numbers, read from where SGLang reads them."""

    get: _Get
    parameters: Mapping[str, Any]
    rope_type: str
    rotary_dim: int

    @property
    def base(self) -> float:
        theta = self.parameters.get("rope_theta")
        theta = self.get("rope_theta") if theta is None else theta
        base = 10000.0 if theta is None else _positive("rope_theta", theta)
        if base <= 1:
            raise UnsupportedError(f"rope_theta is {base:g}, expected a number above 1")
        return base

    @property
    def max_position(self) -> float:
        return self.number("max_position_embeddings", self.get("max_position_embeddings"))

    @property
    def original_max_position(self) -> float:
        if outside := self.get("original_max_position_embeddings"):
            return self.number("original_max_position_embeddings", outside)
        inside = self.parameters.get("original_max_position_embeddings")
        return self.max_position if inside is None else self.number("original_max_position_embeddings", inside)

    def parameter(self, key: str, default: float | None = None) -> float:
        value = self.parameters.get(key)
        return self.number(key, default if value is None else value)

    def number(self, name: str, value: object) -> float:
        return _positive(f"rope type {self.rope_type!r}: {name}", value)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise UnsupportedError(f"{name} is {value!r}, expected a number above 0")
    return float(value)


def _parameters(get: _Get) -> Mapping[str, Any]:
    """Return ``rope_parameters`` (transformers 5) or ``rope_scaling`` (earlier versions)."""
    parameters = get("rope_parameters")
    if parameters is None:
        parameters = get("rope_scaling")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedError(f"the config's RoPE parameters are {parameters!r}, expected a mapping")
    if nested := sorted(key for key, value in parameters.items() if isinstance(value, Mapping)):
        raise UnsupportedError(f"rope parameters by layer type ({', '.join(nested)}): expected one rotation for all")
    return parameters


def _rope_type(parameters: Mapping[str, Any], get: _Get) -> str:
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if "mrope_section" in parameters:
        rope_type = "mrope"
    elif parameters.get("use_fope"):
        rope_type = "fope"
    elif get("dual_chunk_attention_config"):
        rope_type = "dual chunk"
    if rope_type not in _BUILDERS:
        raise UnsupportedError(f"rope type {rope_type!r} is not known; known are {', '.join(_BUILDERS)}")
    return rope_type


def _rotary_dim(family: _Family, get: _Get, parameters: Mapping[str, Any]) -> int:
    """Return the number of rotated channels of a head."""
    head_dim = get("head_dim")
    if head_dim is None:
        hidden, heads = get("hidden_size") or get("n_embd"), get("num_attention_heads") or get("n_head")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise UnsupportedError(f"the config has no head_dim, and cannot divide {hidden!r} by {heads!r} heads")
        head_dim = hidden // heads
    factor = get("partial_rotary_factor")
    factor = parameters.get("partial_rotary_factor") if factor is None else factor
    factor = (family.partial or 1.0) if factor is None else _positive("partial_rotary_factor", factor)
    if family.partial is None and factor != 1:
        raise UnsupportedError(f"partial_rotary_factor is {factor}, but SGLang rotates whole heads of this model type")
    rotary_dim = (get("rotary_dim") if family.says_dim else None) or int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedError(f"{rotary_dim} of a head's {head_dim} channels rotate; expected an even number above 0")
    return int(rotary_dim)


def _interleaved(family: _Family, get: _Get) -> bool:
    neox = get("rope_is_neox_style") if family.obeys_style else None
    return family.interleaved if neox is None else not neox


def _build(setting: _Setting, interleaved: bool) -> Rope:
    inv_freq, attention_scaling, divisor = _BUILDERS[setting.rope_type](setting)
    return Rope(
        inv_freq=tuple(inv_freq.tolist()),
        attention_scaling=attention_scaling,
        interleaved=interleaved,
        position_divisor=divisor,
    )


_Parts = tuple[torch.Tensor, float, float]  # inv_freq, attention_scaling, position_divisor


def _exponents(setting: _Setting) -> torch.Tensor:
    return torch.arange(0, setting.rotary_dim, 2, dtype=torch.float32, device="cpu") / setting.rotary_dim


def _inv_freq(setting: _Setting, base: float) -> torch.Tensor:
    inv_freq: torch.Tensor = 1.0 / (base ** _exponents(setting))
    return inv_freq


def _default(setting: _Setting) -> _Parts:
    return _inv_freq(setting, setting.base), 1.0, 1.0


def _linear(setting: _Setting) -> _Parts:
    """``LinearScalingRotaryEmbedding``: Chen et al., arXiv 2306.15595."""
    return _inv_freq(setting, setting.base), 1.0, setting.parameter("factor", 1.0)


def _dynamic(setting: _Setting) -> _Parts:
    """``DynamicNTKScalingRotaryEmbedding``, ``DynamicNTKAlphaRotaryEmbedding`` (with ``alpha``).

    It is not dynamic in SGLang: the base is that of the longest sequence at every length. Transformers scales nothing
    up to ``max_position_embeddings``.
    """
    if setting.rotary_dim == 2:
        raise UnsupportedError("rope type 'dynamic' needs more than two rotated channels")
    if setting.parameters.get("alpha") is not None:
        grown = setting.parameter("alpha")
    else:
        factor = setting.parameter("factor", 1.0)
        max_length = setting.max_position * factor
        grown = (factor * max_length / setting.max_position) - (factor - 1)
    return _inv_freq(setting, setting.base * grown ** (setting.rotary_dim / (setting.rotary_dim - 2))), 1.0, 1.0


def _llama3(setting: _Setting) -> _Parts:
    """``Llama3RotaryEmbedding``."""
    inv_freq = _inv_freq(setting, setting.base)
    factor, original = setting.parameter("factor", 1.0), setting.original_max_position
    low, high = setting.parameter("low_freq_factor", 1.0), setting.parameter("high_freq_factor", 4.0)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low) if low != high else torch.zeros_like(inv_freq)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, slow), 1.0, 1.0


def _yarn(setting: _Setting) -> _Parts:
    """``YaRNScalingRotaryEmbedding``: Peng et al., arXiv 2309.00071."""
    base, factor = setting.base, setting.parameter("factor", 1.0)
    powers = base ** _exponents(setting)
    extrapolated, interpolated = 1.0 / powers, 1.0 / (factor * powers)
    low, high = _yarn_range(setting, base)
    ramp = (torch.arange(setting.rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    kept = (1 - ramp.clamp(0, 1)) * setting.parameter("extrapolation_factor", 1.0)
    return interpolated * (1 - kept) + extrapolated * kept, _yarn_scaling(setting, factor), 1.0


def _yarn_range(setting: _Setting, base: float) -> tuple[float, float]:
    """Return the pairs between which frequencies change from unscaled to divided by the factor."""

    def pair(num_rotations: float) -> float:
        turns = setting.original_max_position / (num_rotations * 2 * math.pi)
        return (setting.rotary_dim * math.log(turns)) / (2 * math.log(base))

    low, high = pair(setting.parameter("beta_fast", 32.0)), pair(setting.parameter("beta_slow", 1.0))
    if setting.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, setting.rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _yarn_scaling(setting: _Setting, factor: float) -> float:
    """Return the factor of cosines and sines.

    SGLang ignores ``attention_factor``. If it differs from what SGLang computes, the config is refused: measurements
    with transformers would not apply to the model that SGLang serves.
    """

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scaling = grown(1.0)
    if all(setting.parameters.get(key) is not None for key in ("mscale", "mscale_all_dim")):
        scaling = grown(setting.parameter("mscale")) / grown(setting.parameter("mscale_all_dim"))
    scaling *= setting.parameter("attn_factor", 1.0)
    wanted = setting.parameter("attention_factor", scaling)
    if not math.isclose(wanted, scaling, rel_tol=1e-6):
        raise UnsupportedError(f"rope type 'yarn': attention_factor is {wanted}, but SGLang scales by {scaling:.6g}")
    return scaling


_BUILDERS: dict[str, Callable[[_Setting], _Parts]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
