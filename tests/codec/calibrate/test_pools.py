"""What the table of models says is what SGLang does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import get_hybrid_layer_ids, is_hybrid_swa_model
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from sgl_kvfetch.codec.calibrate.pools import WINDOWS_APART, keeps_nothing, pool_of_keys
from sgl_kvfetch.codec.quant.layer_map import Pool

TYPES = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
# Their configs have layer types of their own. DeepSeek V4's pools have compressed keys, which nothing here takes.
OTHER_CONFIGS = {"DeepseekV4ForCausalLM", "InklingForConditionalGeneration"}
LOADABLE = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}


def test_the_table_has_what_sglang_has() -> None:
    """Of all models that transformers can load, and so can be calibrated; the table may have more."""
    text = SimpleNamespace(layer_types=TYPES, sliding_window=64)
    apart = {name for name in LOADABLE if isinstance(name, str) and is_hybrid_swa_model([name], text)}
    assert apart - WINDOWS_APART == set()
    assert {name for name in WINDOWS_APART if not is_hybrid_swa_model([name], text)} == set()


@pytest.mark.parametrize("architecture", sorted(WINDOWS_APART - OTHER_CONFIGS))
def test_the_same_layers_are_in_the_pool_as_in_sglangs(architecture: str) -> None:
    config = SimpleNamespace(
        num_hidden_layers=4, layer_types=TYPES, hybrid_layer_pattern=[1, 1, 1, 0], sliding_window=64
    )
    windows, full = get_hybrid_layer_ids([architecture], config)
    found = [pool_of_keys([architecture], config, layer) for layer in range(4)]
    assert [layer for layer in range(4) if found[layer] == Pool.WINDOW] == windows
    assert [layer for layer in range(4) if found[layer] == Pool.KV] == full


def test_windows_share_the_pool_elsewhere() -> None:
    config = SimpleNamespace(layer_types=TYPES)
    assert [pool_of_keys(["Gemma3ForCausalLM"], config, layer) for layer in range(4)] == [Pool.KV] * 4


def test_an_mlp_keeps_nothing() -> None:
    """A layer that caches nothing otherwise reads what another one has cached, so that its errors count there."""
    config = SimpleNamespace(layer_types=["mamba", "mlp", "moe", "full_attention"])
    assert [keeps_nothing(config, layer) for layer in range(5)] == [False, True, True, False, False]
