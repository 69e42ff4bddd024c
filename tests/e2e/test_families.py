"""Families of models with full attention, each as a tiny random model: computed as transformers does, and restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.engine import SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.models import FAMILIES, make_tiny
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_stored_and_restored(family: str, store: StoreProcess, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, family)
    with SGLangServer(model, extra_args=hicache_args(store.url)) as server:
        computed = ask(server, make_prompt(0))
        assert computed.output_ids == _greedy_tokens(model, make_prompt(0), len(computed.output_ids))
        wait_until_written(server, 640 // PAGE_SIZE)
        server.flush()
        ask(server, make_prompt(1))  # in the same slots, of which nothing is left
        wait_until_written(server, 2 * 640 // PAGE_SIZE)
        server.flush()
        restored = ask(server, make_prompt(0))
    assert from_storage(restored) >= 0.9 * 640
    assert same_answer(restored, computed)


def _greedy_tokens(model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        out = loaded.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
