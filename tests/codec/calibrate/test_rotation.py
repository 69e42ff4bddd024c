"""A model's rotation is found in its keys, whatever the model's type, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import base as sglang_base, get_rope
from transformers import AutoConfig, AutoModelForCausalLM

from harness.models import make_tiny_llama
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.calibrate.rope import find_rope
from sgl_kvfetch.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_POSITIONS = 100_000

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25_000},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 24,
        "beta_slow": 2,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_layers=1, hidden_size=64, head_dim=32, vocab_size=64)


@pytest.fixture
def random_model(tokenizer_files: Path, tmp_path: Path) -> Any:
    def make(model_type: str, **changes: Any) -> LayeredModel:
        path = tmp_path / model_type
        shutil.copytree(tokenizer_files, path)
        shape: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "initializer_range": 0.2,
            "max_position_embeddings": NUM_POSITIONS,
            "pad_token_id": 0,
        }
        config = AutoConfig.for_model(model_type, **shape | changes)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return LayeredModel(str(path))

    return make


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_is_rotated_as_in_sglang(random_model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sglang_base, "_is_cpu", True)
    scaling = SCALINGS[name]
    rope = find_rope(random_model("llama", rope_parameters={**scaling, "rope_theta": 10_000.0}))
    assert not rope.interleaved
    theirs = get_rope(32, 32, NUM_POSITIONS, 10_000, True, None if name == "default" else scaling, torch.float32)
    cache = theirs.cos_sin_cache[:NUM_POSITIONS] / theirs.cos_sin_cache[0, 0]  # without a factor, as YaRN's
    # Transformers divides the frequencies of linear scaling, SGLang the positions, which round differently.
    torch.testing.assert_close(rope.table(0, NUM_POSITIONS), cache, rtol=0, atol=1e-2)


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
    rope = find_rope(random_model(model_type, **changes))
    assert (rope.rotary_dim, rope.interleaved) == (rotary_dim, interleaved)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' is not known; known are",
        ),
        ("smollm3", {}, "no rotation by the model's frequencies"),  # some layers have none
        ("cohere2", {}, "no rotation by the model's frequencies"),
        ("gemma3_text", {}, "no rotation by the model's frequencies"),  # two bases
        ("gpt2", {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 4096}, "no rotation by the model's freq"),
    ],
)
def test_a_rotation_that_is_not_alike_in_all_layers_is_refused(
    random_model: Any, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_rope(random_model(model_type, **changes))
