"""What the converter refuses, and the order of rows, on GGUF files of a few bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf_to_hf import _in_transformers_order, convert
from sgl_kvfetch.errors import ConfigError

gguf = pytest.importorskip("gguf")


def write_gguf(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(64)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("gpt2", "the architecture 'gpt2'; only 'llama' can be converted"),
        ("llama", r"no metadata llama\.embedding_length"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, architecture: str, message: str) -> None:
    source = write_gguf(tmp_path / "model.gguf", architecture)
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path, lambda line: None)


def test_rows_of_q_and_k_come_back_into_transformers_order() -> None:
    heads, head_dim = 3, 8
    rows = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(heads * head_dim, 5)
    halves = rows.reshape(heads, 2, head_dim // 2, 5)
    in_llama_cpp_order = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)
    assert np.array_equal(in_llama_cpp_order[:4], rows[[0, 4, 1, 5]])
    assert np.array_equal(_in_transformers_order(in_llama_cpp_order, heads), rows)
