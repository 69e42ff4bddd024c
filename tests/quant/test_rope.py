"""The rotation that is taken off K is SGLang's own, and transformers' where the two agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang.srt.models
import torch
from sglang.srt.layers.rotary_embedding import base as sglang_base
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import AutoConfig, PretrainedConfig
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.quant.rope import _FAMILIES, Rope, rope_of_config, rotate, unrotate

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it SGLang asks for vLLM's kernel, unless our CPU platform was there when SGLang was first imported."""
    monkeypatch.setattr(sglang_base, "_is_cpu", True)


FIRST_TOKENS = (0, 1, 1000, 4090, 65_000, 99_970)
NUM_TOKENS = 30

# 100,000 positions or more each.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"max_position_embeddings": 100_000},
    "linear": {"max_position_embeddings": 25_000, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear by a third": {"max_position_embeddings": 33_400, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {"max_position_embeddings": 25_000, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "dynamic alpha": {"max_position_embeddings": 100_000, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
    "llama3": {
        "max_position_embeddings": 100_000,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "max_position_embeddings": 100_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25_000},
    },
    "yarn mscale": {
        "max_position_embeddings": 100_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 24,
            "beta_slow": 2,
        },
    },
    "yarn not truncated": {
        "max_position_embeddings": 100_000,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "yarn attn_factor": {
        "max_position_embeddings": 25_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8, "attention_factor": 0.910903548889591},
    },
}
# Transformers' dynamic scaling depends on the sequence's length, and it knows no alpha and no attn_factor.
AGREED = [name for name in SCALINGS if not name.startswith("dynamic") and name != "yarn attn_factor"]


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "rope_theta": 10_000.0,
        **changes,
    }


def sglang_rope(config: dict[str, Any], head_dim: int = 64, rotary_dim: int = 64, neox: bool = True) -> Any:
    return get_rope(
        head_dim,
        rotary_dim,
        config["max_position_embeddings"],
        config["rope_theta"],
        neox,
        config.get("rope_scaling"),
        torch.float32,
    )


def random_k(dim: int, heads: int = 3) -> torch.Tensor:
    return torch.randn(NUM_TOKENS, heads, dim, generator=torch.Generator().manual_seed(5)) * 4


@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_is_sglangs_cache(name: str) -> None:
    config = llama_config(**SCALINGS[name])
    cache = sglang_rope(config).cos_sin_cache
    rope = rope_of_config(config)
    for first_token in FIRST_TOKENS:
        expected = cache[first_token : first_token + NUM_TOKENS]
        torch.testing.assert_close(rope.table(first_token, NUM_TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 24)])
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_rotation_is_sglangs(name: str, head_dim: int, rotary_dim: int, neox: bool) -> None:
    config = llama_config(
        **SCALINGS[name],
        head_dim=head_dim,
        partial_rotary_factor=rotary_dim / head_dim,
        rope_is_neox_style=neox,
    )
    rope = rope_of_config(config)
    assert rope.rotary_dim == rotary_dim
    assert rope.interleaved is not neox
    theirs = sglang_rope(config, head_dim, rotary_dim, neox)
    k = random_k(head_dim)
    for first_token in FIRST_TOKENS:
        positions = torch.arange(first_token, first_token + NUM_TOKENS)
        _, expected = theirs.forward_native(positions, k.flatten(1).clone(), k.flatten(1).clone())
        rotated = rotate(k, rope.table(first_token, NUM_TOKENS), rope)
        torch.testing.assert_close(rotated.flatten(1), expected, rtol=0, atol=1e-5 * float(k.abs().max()))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_unrotate_undoes_rotate(name: str, interleaved: bool) -> None:
    config = llama_config(**SCALINGS[name], head_dim=72, partial_rotary_factor=0.5, rope_is_neox_style=not interleaved)
    rope = rope_of_config(config)
    k = random_k(72).view(NUM_TOKENS, 1, 3, 72).expand(-1, 2, -1, -1)
    for first_token in FIRST_TOKENS:
        table = rope.table(first_token, NUM_TOKENS)
        rotated = rotate(k, table, rope)
        assert first_token == 0 or not torch.allclose(rotated, k, atol=0.1)
        assert torch.equal(rotated[..., 36:], k[..., 36:])
        torch.testing.assert_close(unrotate(rotated, table, rope), k, rtol=0, atol=1e-5)


def test_a_segments_rows_do_not_depend_on_where_it_was_cut() -> None:
    rope = rope_of_config(llama_config(**SCALINGS["llama3"]))
    whole = rope.table(0, 4200)
    assert torch.equal(torch.cat((rope.table(0, 64), rope.table(64, 4096), rope.table(4160, 40))), whole)


@pytest.mark.parametrize("name", AGREED)
@pytest.mark.parametrize("new_spelling", [False, True])
def test_rotation_is_transformers(name: str, new_spelling: bool) -> None:
    plain = llama_config(**SCALINGS[name])
    if new_spelling:
        scaling = dict(plain.pop("rope_scaling", {"rope_type": "default"}))
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
        plain["rope_parameters"] = {**scaling, "rope_theta": plain.pop("rope_theta")}
    config = AutoConfig.for_model(**plain)
    rope = rope_of_config(config)
    assert rope == rope_of_config(plain)
    k = random_k(64)
    for first_token in FIRST_TOKENS:
        positions = torch.arange(first_token, first_token + NUM_TOKENS)[None]
        cos, sin = LlamaRotaryEmbedding(config)(k, positions)
        _, expected = rotate_halves(k.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        rotated = rotate(k, rope.table(first_token, NUM_TOKENS), rope)
        # Linear scaling: transformers divides the frequencies, SGLang the positions, which round differently.
        atol = 5e-2 if "linear" in name else 1e-4
        torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=0, atol=atol)


def test_interleaved_rotation_is_transformers() -> None:
    config = AutoConfig.for_model("cohere", hidden_size=256, num_attention_heads=4, max_position_embeddings=8192)
    rope = rope_of_config(config)
    assert rope.interleaved
    k = random_k(64)
    table = rope.table(100, NUM_TOKENS)
    cos, sin = (x.repeat_interleave(2, dim=-1)[None] for x in table.chunk(2, dim=-1))
    _, expected = rotate_pairs(k.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(k, table, rope), expected[0].transpose(0, 1), rtol=0, atol=1e-5)


def test_dynamic_follows_sglang_also_below_the_original_length() -> None:
    scaled = rope_of_config(llama_config(**SCALINGS["dynamic"]))
    assert scaled.inv_freq != rope_of_config(llama_config(**SCALINGS["default"])).inv_freq


def test_a_rope_survives_json_exactly() -> None:
    for changes in SCALINGS.values():
        rope = rope_of_config(llama_config(**changes))
        assert msgspec.json.decode(msgspec.json.encode(rope), type=Rope) == rope
        assert torch.tensor(rope.inv_freq, dtype=torch.float32).tolist() == list(rope.inv_freq)


@pytest.mark.parametrize("change", ['"inv_freq":[]', '"inv_freq":[1.0],"attention_scaling":0', '"inv_freq":[1e999]'])
def test_a_stored_rope_is_validated(change: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode("{" + change + "}", type=Rope)


def test_defaults_by_model_type() -> None:
    def rope(model_type: str, **changes: Any) -> Rope:
        return rope_of_config(llama_config(model_type=model_type, **changes))

    assert rope("llama").rotary_dim == 64
    assert rope("glm4").rotary_dim == rope("glm4_moe").rotary_dim == 32
    assert rope("glm4", rope_parameters={"partial_rotary_factor": 0.25}).rotary_dim == 16
    assert rope("glm4").interleaved
    assert not rope("glm4_moe").interleaved
    assert rope("ernie4_5").interleaved
    assert not rope("ernie4_5", rope_is_neox_style=True).interleaved
    gptj = rope_of_config({"model_type": "gptj", "n_embd": 256, "n_head": 4, "rotary_dim": 16})
    assert (gptj.rotary_dim, gptj.interleaved) == (16, True)
    no_theta = llama_config()
    del no_theta["rope_theta"]
    assert rope_of_config(no_theta) == rope("llama")


SOURCES = {
    "arcee": "arcee",
    "cohere": "commandr",
    "ernie4_5": "ernie4",
    "ernie4_5_moe": "ernie4",
    "gptj": "gpt_j",
    "internlm3": "llama",
    "mistral": "llama",
    "phi3": "llama",
}


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_pairs_are_what_sglangs_models_ask_for(model_type: str) -> None:
    folder = Path(next(iter(sglang.srt.models.__path__)))
    source = (folder / f"{SOURCES.get(model_type, model_type)}.py").read_text()
    asks_for_pairs = "is_neox_style=False" in source or '"rope_is_neox_style", False' in source
    assert asks_for_pairs == _FAMILIES[model_type].interleaved
    assert ('"rope_is_neox_style"' in source) == _FAMILIES[model_type].obeys_style
    assert ("rope_scaling=" in source) == _FAMILIES[model_type].scaled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "cohere2"}, "model_type 'cohere2'.*known are .*llama"),
        ({"model_type": None}, "model_type None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "'longrope'.*known are default, linear, dynamic, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_scaling": {"type": "deepseek_yarn", "factor": 4.0}}, "'deepseek_yarn'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, "'mrope'"),
        ({"rope_scaling": {"type": "default", "use_fope": True}}, "'fope'"),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 1}}, "'dual chunk'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "full_attention, sliding_attention"),
        ({"rope_parameters": "yarn"}, "expected a mapping"),
        ({"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'.*'mixtral'"),
        ({"model_type": "qwen2", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.01}, "0 of a head's 64"),
        ({"partial_rotary_factor": 2}, "128 of a head's 64"),
        ({"hidden_size": None}, "no head_dim, and cannot divide None by 4 heads"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, "'linear': factor is 'four'"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "'linear': factor is nan"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position_embeddings is None"),
        ({"rope_scaling": {"type": "llama3"}}, "max_position_embeddings is None"),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
            "attention_factor is 1.0, but SGLang scales by 1.1386",
        ),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rope_of_config(llama_config(**changes))


def test_configs_of_transformers_with_layer_types_are_refused() -> None:
    config: PretrainedConfig = AutoConfig.for_model("gemma3_text")
    with pytest.raises(UnsupportedError, match="gemma3_text"):
        rope_of_config(config)
