"""EAGLE, EAGLE3 and MTP, whose draft layers are made to repeat what the model does: ``pytest tests/e2e/drafts.py``.

The suite does not run them, since they take minutes in Triton's interpreter; it runs STANDALONE (test_draft_model.py).

A draft layer gets the token behind each place, so it can do what the model does one place later, if the model has one
layer that does anything: attention that reads tokens in one half of the channels and writes what it finds to the other
half, which alone decides the answer. The draft layer has its weights, and nothing of the model's hidden states reaches
its answer. So almost all draft tokens are accepted, as long as the draft layer finds its keys and values of the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.engine import Generation, SGLangServer, device_args, hicache_args, other_models
from harness.metrics import wait_until_written
from harness.models import make_tiny, make_tiny_llama
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, from_storage, make_prompt
from tests.e2e.test_draft_model import DRAFT_TOKENS, answer_of, speculating

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZE = 128
_READ, _WRITTEN = slice(SIZE // 2), slice(SIZE // 2, None)
SHAPE = {"vocab_size": 2048, "hidden_size": SIZE, "intermediate_size": 128, "num_layers": 3, "num_heads": 2}
NUM_TOKENS = 8 * PAGE_SIZE
_LAYER = "model.layers.0."


def make(directory: Path, algorithm: str, *, is_blank: bool) -> tuple[Path, Path | None]:
    """Write a model and its draft model; return their directories. An MTP layer lies beside the model's own. The draft
    layer of a blank one has zeros for keys and values."""
    from safetensors.torch import load_file, save_file

    model, draft = directory / "model", directory / "draft"
    if algorithm == "MTP":
        flags = {"num_attention_heads": 2, "num_hidden_layers": 1, "tie_word_embeddings": False}
        make_tiny(model, "qwen2", flags | {"pad_token_id": None})  # the embedding of such a token is zero
    else:
        make_tiny_llama(model, **SHAPE)
    weights = load_file(model / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, _WRITTEN] = 0
    embeddings *= SIZE**0.5 / embeddings.norm(dim=1, keepdim=True)  # norms change nothing
    weights["lm_head.weight"][:, _READ] = 0
    for name, weight in weights.items():
        if name.endswith("down_proj.weight"):
            weight[:] = 0
        elif name.endswith("o_proj.weight"):
            weight[_READ if name.startswith(_LAYER) else slice(None)] = 0
    layer = {name.removeprefix(_LAYER): x.clone() for name, x in weights.items() if name.startswith(_LAYER)}
    if is_blank:
        for name in ("k_proj", "v_proj"):
            layer[f"self_attn.{name}.weight"][:] = 0
    blank, ones = torch.zeros(SIZE, SIZE), torch.ones(SIZE)
    config = json.loads((model / "config.json").read_text())
    if algorithm == "MTP":
        # Published as MiMo: a norm of the token's embedding beside one of the model's hidden state.
        layer |= {
            "input_proj.weight": torch.cat([blank, torch.eye(SIZE)], dim=1),
            **{f"{name}_layernorm.weight": ones.clone() for name in ("token", "hidden", "final")},
        }
        weights |= {f"model.mtp_layers.0.{name}": x for name, x in layer.items()}
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (model / "config.json").write_text(json.dumps(config))
        save_file(weights, model / "model.safetensors")
        return model, None
    save_file(weights, model / "model.safetensors")
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    of_draft = {f"layers.0.{name}": x for name, x in layer.items() if name != "input_layernorm.weight"}
    of_draft |= {"fc.weight": torch.cat([torch.eye(SIZE), blank], dim=1), "fc.bias": torch.zeros(SIZE)}
    if algorithm == "EAGLE3":
        # Its layer takes the embeddings and the hidden states side by side, and adds to the hidden states.
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = layer[f"self_attn.{name}.weight"]
            layer[f"self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
        of_draft = {f"midlayer.{name}": x for name, x in layer.items()} | {
            "midlayer.hidden_norm.weight": ones,
            "fc.weight": torch.cat([blank, blank], dim=1),
            "norm.weight": 1e-3 * ones,  # so that what it passes on to its next token is next to nothing
            "lm_head.weight": weights["lm_head.weight"],
        }
        captured = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SHAPE["vocab_size"]}
        config |= {"norm_output": True, "eagle_config": captured}
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    save_file(of_draft, draft / "model.safetensors")
    return model, draft


def serve(mode: str, algorithm: str, model: Path, draft: Path | None, store: StoreProcess) -> SGLangServer:
    mode_args = hicache_args if mode == "host" else device_args
    flags = speculating("EAGLE" if algorithm == "MTP" else algorithm, draft)
    others = set(other_models(model).split(",")) - {"llama_eagle", "llama_eagle3", "mimo_mtp"}
    env = {"TRITON_INTERPRET": "1", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others)}
    return SGLangServer(model, extra_args=[*mode_args(store.url, model_id="both"), *flags], env=env)


def ask(server: SGLangServer, salt: str | None = None) -> tuple[Generation, float]:
    # The draft layers do not see a prompt's first token. This one's answer does not depend on it.
    return answer_of(server, make_prompt(1, NUM_TOKENS), 4 * DRAFT_TOKENS, cache_salt=salt)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "MTP"])
@pytest.mark.parametrize("mode", ["device", "host"])
def test_draft_layers_go_on_from_what_they_stored(
    algorithm: str, mode: str, tmp_path: Path, store: StoreProcess
) -> None:
    right, blank = (make(tmp_path / str(is_blank), algorithm, is_blank=is_blank) for is_blank in (False, True))
    num_pages = (NUM_TOKENS - 1) // PAGE_SIZE  # of pairs of tokens, which are the tree's keys
    with serve(mode, algorithm, *blank, store) as server:
        _, accepted = ask(server)
        assert accepted < 2
        wait_until_written(server, num_pages)
    with serve(mode, algorithm, *right, store) as server:
        computed, accepted = ask(server, "right")
        assert from_storage(computed) == 0
        assert len(set(computed.output_ids)) > 3  # else any KV cache would do
        assert accepted > 3
        wait_until_written(server, num_pages)
        server.flush()
        restored, accepted_again = ask(server, "right")
        assert from_storage(restored) == num_pages * PAGE_SIZE
        assert restored.output_ids == computed.output_ids
        assert accepted_again == accepted
        # The other draft model's zeros, which the same `model_id` lets through.
        misled, accepted_less = ask(server)
        assert from_storage(misled) == num_pages * PAGE_SIZE
        assert misled.output_ids == computed.output_ids
        assert accepted_less < 2
    with serve("host" if mode == "device" else "device", algorithm, *right, store) as server:
        restored, accepted_again = ask(server, "right")
        assert from_storage(restored) == num_pages * PAGE_SIZE
        assert restored.output_ids == computed.output_ids
        assert accepted_again == accepted
