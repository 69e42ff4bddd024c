"""What each layer of a model keeps, and how it rotates keys, is found whatever the model's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import base as sglang_base, get_rope

from harness.models import make_tiny
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.rope import Rope

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_POSITIONS = 100_000


def yarn(factor: float, length: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **more}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "yarn": yarn(4.0, 25_000),
    "yarn mscale": yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.5, beta_fast=24, beta_slow=2),
    "yarn not truncated": yarn(32.0, 4096, truncate=False),
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
        ("gemma2", {}, 32, False),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}, 8, False),
        ("phi", {}, 16, False),
        ("cohere", {}, 32, True),
        ("glm4", {}, 16, True),
        ("ernie4_5", {}, 32, True),
    ],
)
def test_pairs_are_found(
    random_model: Any, model_type: str, changes: dict[str, Any], rotary_dim: int, interleaved: bool
) -> None:
    rope = only_rope(random_model(model_type, **changes))
    assert (rope.rotary_dim, rope.interleaved) == (rotary_dim, interleaved)


def rotations_of(layers: LayerMap) -> list[int | None]:
    return [layer.rotation for layer in layers.layers]


def test_layers_rotate_by_their_own_bases(random_model: Any) -> None:
    """Gemma 3 has one base for its windows, and another for its full layers."""
    types = ["sliding_attention", "full_attention"] * 2
    layers, notes = map_layers(random_model("gemma3_text", layer_types=types, sliding_window=512))
    assert not notes
    assert rotations_of(layers) == [0, 1, 0, 1]
    assert [layer.window for layer in layers.layers] == [512, None] * 2
    bases = [rope.inv_freq[1] ** -16 for rope in layers.rotations]
    assert bases == pytest.approx([10_000, 1_000_000], rel=1e-3)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
        ("cohere2", {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}),
    ],
)
def test_layers_without_a_rotation_have_none(random_model: Any, model_type: str, changes: dict[str, Any]) -> None:
    layers, notes = map_layers(random_model(model_type, **changes))
    assert not notes
    assert rotations_of(layers) == [0, 0, None, 0]


def test_keys_whose_rotation_is_not_known_stay_rotated(random_model: Any) -> None:
    layers, (note,) = map_layers(random_model("gpt2", n_embd=64, n_head=2, n_layer=2, n_positions=4096))
    assert "no rotation by the model's freq" in note
    assert "K of layers 0 to " in note
    assert not layers.rotations
