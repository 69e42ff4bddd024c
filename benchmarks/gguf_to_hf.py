"""Converts the GGUF file of a Llama, as llama.cpp reads it, into a Hugging Face folder (bfloat16)."""

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
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write weights, config and tokenizer to ``folder``, which exists. ``say`` gets a line for each step.

    Raises ConfigError if the file's architecture is not known, or if it lacks metadata.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    say(f"reading {source.name}")
    reader = GGUFReader(source)
    config = _config(reader)
    say(f"converting {len(reader.tensors)} tensors to bfloat16")
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    say("converting the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _config(reader: GGUFReader) -> Any:
    """Return the model's config, of transformers."""
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file has no metadata {key}")
        return field.contents()

    if (architecture := value("general.architecture")) != "llama":
        raise ConfigError(f"the GGUF file has the architecture {architecture!r}; expected 'llama'")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )


def _weights(reader: GGUFReader, config: Any) -> dict[str, Any]:
    """Return the weights as bfloat16 tensors, by transformers' names."""
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        if name not in _NAMES or kind != "weight":
            raise ConfigError(f"the GGUF file has an unknown tensor {tensor.name}")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            values = _in_transformers_order(values, heads[name])
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{_NAMES[name]}.weight"] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def _in_transformers_order(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Put the rows of Q's or K's matrix, (heads * head_dim, hidden_size), into the order that transformers expects.

    The rotary embedding rotates pairs of a head's rows. transformers pairs row i with row i + head_dim / 2. llama.cpp
    pairs row 2i with row 2i + 1, so its own converter interleaves the two halves of each head. This undoes that.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
