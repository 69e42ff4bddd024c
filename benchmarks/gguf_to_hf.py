"""Converts the GGUF file of a Llama, Qwen2 or Gemma 3, as llama.cpp reads it, into a Hugging Face folder (bfloat16)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_kvfetch.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

VERSION = 2  # increase it when the written files change, so that cached folders of older code are not used
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CONFIGS = {"llama": "Llama", "qwen2": "Qwen2", "gemma3": "Gemma3"}
_LOCAL_THETA = 10000.0  # of Gemma 3's sliding windows; it is in llama.cpp's code, not in the file


def convert(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write weights, config and tokenizer to ``folder``, which exists. ``say`` gets a line for each step.

    Raises ConfigError if the file's architecture is not known, or if it lacks metadata.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    say(f"reading {source.name}")
    reader = GGUFReader(source)
    config = _config(reader)
    say(f"converting {len(reader.tensors)} tensors to bfloat16")
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    say("converting the tokenizer")
    _tokenizer(reader, source).save_pretrained(folder)


def _tokenizer(reader: GGUFReader, source: Path) -> Any:
    """Return the model's tokenizer, of transformers. It puts BOS before each text if the file says so: transformers
    does not look, and no server computes a prompt of Gemma without it."""
    from transformers import AutoTokenizer

    field = reader.get_field("tokenizer.ggml.add_bos_token")
    own = {"add_bos_token": True} if field is not None and field.contents() else {}
    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **own)


def _config(reader: GGUFReader) -> Any:
    """Return the model's config, of transformers."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file has no metadata {key}")
        return field.contents()

    architecture = value("general.architecture")
    if architecture not in _CONFIGS:
        raise ConfigError(
            f"the GGUF file has the architecture {architecture!r}; expected one of {', '.join(map(repr, _CONFIGS))}"
        )
    theta = value(f"{architecture}.rope.freq_base")
    own: dict[str, Any] = {"rope_theta": theta}
    config = LlamaConfig if architecture == "llama" else Qwen2Config
    if architecture == "gemma3":
        config = Gemma3TextConfig
        thetas = {"full_attention": theta, "sliding_attention": _LOCAL_THETA}
        own = {
            "head_dim": value("gemma3.attention.key_length"),
            "query_pre_attn_scalar": value("gemma3.attention.key_length"),
            "sliding_window": value("gemma3.attention.sliding_window"),
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": x} for kind, x in thetas.items()},
        }
    return config(
        architectures=[f"{_CONFIGS[architecture]}ForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value(f"{architecture}.embedding_length"),
        intermediate_size=value(f"{architecture}.feed_forward_length"),
        num_hidden_layers=value(f"{architecture}.block_count"),
        num_attention_heads=value(f"{architecture}.attention.head_count"),
        num_key_value_heads=value(f"{architecture}.attention.head_count_kv"),
        max_position_embeddings=value(f"{architecture}.context_length"),
        rms_norm_eps=value(f"{architecture}.attention.layer_norm_rms_epsilon"),
        **own,
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )


def _weights(reader: GGUFReader, config: Any) -> dict[str, Any]:
    """Return the weights and biases as bfloat16 tensors, by transformers' names."""
    import torch
    from gguf.quants import dequantize

    is_gemma = config.model_type == "gemma3_text"
    names = _GEMMA_NAMES if is_gemma else _NAMES
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        if name not in names or kind not in ("weight", "bias"):
            raise ConfigError(f"the GGUF file has an unknown tensor {tensor.name}")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in heads and config.model_type == "llama":  # llama.cpp keeps a Qwen2's rows as transformers has them
            values = _in_transformers_order(values, heads[name])
        if is_gemma and name.endswith("norm"):
            values = values - 1  # transformers adds it when it computes
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{names[name]}.{kind}"] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def _in_transformers_order(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Put the rows of Q's or K's matrix, (heads * head_dim, hidden_size), into the order that transformers expects.

    The rotary embedding rotates pairs of a head's rows. transformers pairs row i with row i + head_dim / 2. llama.cpp
    pairs row 2i with row 2i + 1, so its own converter interleaves the two halves of each head. This undoes that.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
