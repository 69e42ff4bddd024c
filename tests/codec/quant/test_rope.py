"""The rotation that is taken off K is SGLang's own, in its order of operations."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.layers.rotary_embedding import base as sglang_base, get_rope
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sgl_kvfetch.codec.quant.rope import Rope, Rotations, rotate, unrotate

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
}


def llama_config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "rope_theta": 10_000.0, **changes}


def transformers_rope(config: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(AutoConfig.for_model(**config))


def rope_of(config: dict[str, Any], *, interleaved: bool = False) -> Rope:
    theirs = transformers_rope(config)
    return Rope(
        inv_freq=tuple(theirs.inv_freq.tolist()),
        attention_scaling=theirs.attention_scaling,
        interleaved=interleaved,
    )


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


def test_positions_may_be_divided() -> None:
    """As in profiles that followed SGLang's linear scaling."""
    config = llama_config(max_position_embeddings=33_400, rope_scaling={"type": "linear", "factor": 3.0})
    plain = rope_of(llama_config(max_position_embeddings=100_000))
    rope = msgspec.structs.replace(plain, position_divisor=3.0)
    expected = sglang_rope(config).cos_sin_cache[65_000 : 65_000 + NUM_TOKENS]
    torch.testing.assert_close(rope.table(65_000, NUM_TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 24)])
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_rotation_is_sglangs(name: str, head_dim: int, rotary_dim: int, neox: bool) -> None:
    config = llama_config(**SCALINGS[name], head_dim=rotary_dim)
    rope = rope_of(config, interleaved=not neox)
    assert rope.rotary_dim == rotary_dim
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
    rope = rope_of(llama_config(**SCALINGS[name], head_dim=36), interleaved=interleaved)
    k = random_k(72).view(NUM_TOKENS, 1, 3, 72).expand(-1, 2, -1, -1)
    for first_token in FIRST_TOKENS:
        table = rope.table(first_token, NUM_TOKENS)
        rotated = rotate(k, table, rope)
        assert first_token == 0 or not torch.allclose(rotated, k, atol=0.1)
        assert torch.equal(rotated[..., 36:], k[..., 36:])
        torch.testing.assert_close(unrotate(rotated, table, rope), k, rtol=0, atol=1e-5)


def test_a_segments_rows_do_not_depend_on_where_it_was_cut() -> None:
    rope = rope_of(llama_config(**SCALINGS["llama3"]))
    whole = rope.table(0, 4200)
    assert torch.equal(torch.cat((rope.table(0, 64), rope.table(64, 4096), rope.table(4160, 40))), whole)


def test_a_rope_survives_json_exactly() -> None:
    for changes in SCALINGS.values():
        rope = rope_of(llama_config(**changes))
        assert msgspec.json.decode(msgspec.json.encode(rope), type=Rope) == rope
        assert torch.tensor(rope.inv_freq, dtype=torch.float32).tolist() == list(rope.inv_freq)


@pytest.mark.parametrize("change", ['"inv_freq":[]', '"inv_freq":[1.0],"attention_scaling":0', '"inv_freq":[1e999]'])
def test_a_stored_rope_is_validated(change: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode("{" + change + "}", type=Rope)


@pytest.mark.parametrize(("num_ropes", "pairs", "kept"), [(1, 32, 32), (16, 64, 4), (16, 4096, 1)])
def test_tables_that_are_kept_are_bounded_by_bytes(num_ropes: int, pairs: int, kept: int) -> None:
    ropes = tuple(Rope(inv_freq=(1.0 + i / 100,) * pairs) for i in range(num_ropes))
    rotations = Rotations(ropes, tuple(range(num_ropes)))
    tables = [weakref.ref(rotations.table(first, 2)) for first in range(40)]
    assert [table() is not None for table in tables] == [False] * (40 - kept) + [True] * kept
