"""Which pool of SGLang has what a layer keeps. The one module that knows models by their names.

SGLang decides by a model's architecture whether layers with a window share the pool of the others, as in Gemma 3, or
have a pool of their own, which forgets what a window has left. tests/codec/calibrate/test_pools.py compares this with
SGLang, which a machine that calibrates need not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_kvfetch.codec.quant.layer_map import Pool

# Architectures whose windows SGLang keeps apart, as its `is_hybrid_swa_model` has them.
WINDOWS_APART = frozenset(
    {
        "BeamForCausalLM",
        "DeepseekV4ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "InklingForConditionalGeneration",
        "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)
_SLIDING = ("sliding_attention", "chunked_attention")
# Layers without attention, in models whose layers are either attention or something else.
_KEEPS_NOTHING = ("mlp", "moe")


def type_of(config: Any, layer: int) -> str:
    """Return the type of a layer, as a model's config names it; "" if it does not."""
    types = getattr(config, "layer_types", None) or ()
    return str(types[layer]) if layer < len(types) else ""


def keeps_nothing(config: Any, layer: int) -> bool:
    """Return whether a layer that caches nothing has nothing to cache. Others read another layer's K and V."""
    return type_of(config, layer) in _KEEPS_NOTHING


def pool_of_keys(architectures: Sequence[str], config: Any, layer: int) -> Pool:
    """Return the pool of a layer that keeps keys and values. ``config``: of the text model."""
    has_window = type_of(config, layer) in _SLIDING or _is_in_pattern(config, layer)
    return Pool.WINDOW if has_window and not WINDOWS_APART.isdisjoint(architectures) else Pool.KV


def _is_in_pattern(config: Any, layer: int) -> bool:
    """Return whether a layer has a window in MiMo V2's ``hybrid_layer_pattern``."""
    pattern = getattr(config, "hybrid_layer_pattern", None) or ()
    return layer < len(pattern) and pattern[layer] == 1
