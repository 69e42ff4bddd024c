from pathlib import Path

import pytest

from harness.models import make_tiny_llama


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, of which others take the tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_layers=1, hidden_size=64, head_dim=32, vocab_size=256)
