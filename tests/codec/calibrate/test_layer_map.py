"""What each layer of a model keeps, and how it rotates keys, is found whatever the model's type."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_hybrid_swa_model
from sglang.srt.layers.rotary_embedding import base as sglang_base, get_rope
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from harness.models import OTHER_FAMILIES, OTHER_IMAGE_TEXT, make_tiny, make_tiny_image_text
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import WINDOWS_APART, LayeredModel, pool_of_keys
from sgl_kvfetch.codec.quant.layer_map import Pool
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plugin.identity import pool_layers

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_POSITIONS = 100_000


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "yarn": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 24, "beta_slow": 2},
    "yarn not truncated": YARN | {"factor": 32.0, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.fixture
def random_model(tmp_path: Path) -> Any:
    shape = {"vocab_size": 64, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    shape |= {"max_position_embeddings": NUM_POSITIONS}

    def made(model_type: str, **changes: Any) -> LayeredModel:
        return LayeredModel(str(make_tiny(tmp_path / model_type, model_type, shape | changes)))

    return made


def only_rope(model: LayeredModel) -> Rope:
    """The rotation of all layers, which have the same one."""
    layers, notes = map_layers(model)
    assert not notes
    (rope,) = {layers.rope_of(number) for number in range(model.num_layers)}
    assert rope is not None
    return rope


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_is_rotated_as_in_sglang(random_model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sglang_base, "_is_cpu", True)
    scaling = SCALINGS[name]
    rope = only_rope(random_model("llama", rope_parameters={**scaling, "rope_theta": 10_000.0}))
    assert not rope.interleaved
    theirs = get_rope(32, 32, NUM_POSITIONS, 10_000, True, None if name == "default" else scaling, torch.float32)
    cache = theirs.cos_sin_cache[:NUM_POSITIONS] / theirs.cos_sin_cache[0, 0]  # without a factor, as YaRN's
    # Transformers divides the frequencies of linear scaling, SGLang the positions, which round differently.
    torch.testing.assert_close(rope.table(0, NUM_POSITIONS), cache, rtol=0, atol=1e-2)


def test_long_prompts_may_have_frequencies_of_their_own(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Phi-3: the rotation is that of prompts of the first length, where SGLang has the same."""
    monkeypatch.setattr(sglang_base, "_is_cpu", True)
    factors, length = [1.0 + 0.1 * i for i in range(16)], {"original_max_position_embeddings": 4096}
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [4 * x for x in factors]} | length
    rope = only_rope(random_model("phi3", rope_parameters={"rope_theta": 10_000.0, **scaling}, **length))
    theirs = get_rope(32, 32, NUM_POSITIONS, 10_000, True, scaling, torch.float32)
    cache = theirs.long_short_cos_sin_cache[:4096] / theirs.long_short_cos_sin_cache[0, 0]
    torch.testing.assert_close(rope.table(0, 4096), cache, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("model_type", "changes", "rotary_dim", "interleaved"),
    [
        ("qwen3", {}, 32, False),  # K is normed before its rotation
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}, 8, False),
        ("cohere", {}, 32, True),
        ("glm4", {}, 16, True),
    ],
)
def test_pairs_are_found(
    random_model: Any, model_type: str, changes: dict[str, Any], rotary_dim: int, interleaved: bool
) -> None:
    rope = only_rope(random_model(model_type, **changes))
    assert (rope.rotary_dim, rope.interleaved) == (rotary_dim, interleaved)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "changes", "rotations"),
    [
        ("gemma3_text", {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 512}, [0, 1, 0, 1]),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, [0, 0, None, 0]),
        ("cohere2", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, [0, 0, None, 0]),
    ],
)
def test_layers_rotate_by_their_own_bases_or_not_at_all(
    random_model: Any, model_type: str, changes: dict[str, Any], rotations: list[int | None]
) -> None:
    """Gemma 3 has one base for its windows, and another for its full layers."""
    layers, notes = map_layers(random_model(model_type, **changes))
    assert not notes
    assert [layer.rotation for layer in layers.layers] == rotations
    if model_type == "gemma3_text":
        assert [layer.window for layer in layers.layers] == [512, None] * 2
        bases = [rope.inv_freq[1] ** -16 for rope in layers.rotations]
        assert bases == pytest.approx([10_000, 1_000_000], rel=1e-3)


def test_keys_whose_rotation_is_not_known_stay_rotated(random_model: Any) -> None:
    layers, (note,) = map_layers(random_model("gpt2", n_embd=64, n_head=2, n_layer=2, n_positions=4096))
    assert "no rotation by the model's freq" in note
    assert "K of layers 0 to " in note
    assert not layers.rotations


# What the table of models says is what SGLang does

LOADABLE = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}


def test_the_table_has_what_sglang_has() -> None:
    """Of all models that transformers can load, and so can be calibrated; the table may have more."""
    text = SimpleNamespace(layer_types=[SLIDING, FULL], sliding_window=64)
    apart = {name for name in LOADABLE if isinstance(name, str) and is_hybrid_swa_model([name], text)}
    assert apart - WINDOWS_APART == set()
    assert {name for name in WINDOWS_APART if not is_hybrid_swa_model([name], text)} == set()


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


def test_the_windows_of_mimo_are_in_its_pattern() -> None:
    config = SimpleNamespace(hybrid_layer_pattern=[1, 0])
    found = [pool_of_keys(["MiMoV2FlashForCausalLM"], config, layer) for layer in range(2)]
    assert found == [Pool.WINDOW, Pool.KV]
