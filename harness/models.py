"""Makes a small random Llama with a tokenizer, so that end-to-end runs need no model hub."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TinyLlama:
    """The model's shape. Every token is one word: ``w17`` is token 17."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    seed: int = 0


def make_tiny_llama(directory: Path, shape: TinyLlama | None = None, **changes: int) -> Path:
    """Write a random model and its tokenizer to ``directory``; return the directory.

    Equal shapes and seeds give equal weights. ``changes`` replace fields of the shape. The weights have a larger
    standard deviation than transformers' default, so that the output tokens depend on the whole prompt.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = dataclasses.replace(shape or TinyLlama(), **changes)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, shape.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
