"""Small random models of any type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.models import make_tiny_llama

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, of which others take the tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_layers=1, hidden_size=64, head_dim=32, vocab_size=256)


def make(tokenizer_files: Path, path: Path, model_type: str, **changes: Any) -> Path:
    """Write a random model of this type, whose config has ``changes`` to `SHAPE`."""
    shutil.copytree(tokenizer_files, path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes)).save_pretrained(path)
    return path
