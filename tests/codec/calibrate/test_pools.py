"""What the table of models says is what SGLang does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, get_hybrid_layer_ids, is_hybrid_swa_model
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from harness.models import OTHER_FAMILIES, OTHER_IMAGE_TEXT, make_tiny, make_tiny_image_text
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import WINDOWS_APART, LayeredModel, keeps_nothing, pool_of_keys
from sgl_kvfetch.codec.quant.layer_map import Pool
from sgl_kvfetch.plugin.identity import pool_layers

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*OTHER_FAMILIES, *OTHER_IMAGE_TEXT])
def test_the_map_of_a_model_has_sglangs_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server compares a profile with these: which layers are in the pool of K and V, and the shapes of K and V."""
    path = tmp_path / family
    if family in OTHER_FAMILIES:
        make_tiny(path, family, OTHER_FAMILIES[family])
    else:
        make_tiny_image_text(path, family)
    model = LayeredModel(str(path))
    layers, notes = map_layers(model)
    assert not notes
    config = ModelConfig(str(path))
    monkeypatch.setattr(runtime_context, "process_model_config", lambda: config)
    assert layers.coded == (pool_layers() or tuple(range(model.num_layers)))
    windows = [number for number, layer in enumerate(layers.layers) if layer.pool == Pool.WINDOW]
    assert windows == (config.swa_attention_layer_ids or [])
    shape = config.get_num_kv_heads(1), config.head_dim, config.v_head_dim
    if config.attention_arch == AttentionArch.MLA:
        shape = 1, config.qk_rope_head_dim, config.kv_lora_rank
    assert (model.num_heads, model.k_head_dim, model.v_head_dim) == shape


def test_an_mlp_keeps_nothing() -> None:
    """A layer that caches nothing otherwise reads what another one has cached, so that its errors count there."""
    config = SimpleNamespace(layer_types=["mamba", "mlp", "moe", "full_attention"])
    assert [keeps_nothing(config, layer) for layer in range(5)] == [False, True, True, False, False]
