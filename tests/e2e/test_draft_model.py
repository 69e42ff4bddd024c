"""Speculation with a draft model, whose KV cache is a side pool, on real SGLang and in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.models import TinyLlama, make_tiny_llama
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, from_storage

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SHAPE = TinyLlama(vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=2)
PROMPT = list(range(3, 131))
DRAFT_TOKENS = 4


def serve(model: Path, draft: Path, store: StoreProcess) -> SGLangServer:
    flags = [
        *("--attention-backend", "triton"),
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(DRAFT_TOKENS - 1), "--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
        *("--speculative-eagle-topk", "1"),
    ]
    return SGLangServer(model, extra_args=[*hicache_args(store.url), *flags], env={"TRITON_INTERPRET": "1"})


def ask(server: SGLangServer) -> tuple[Generation, float]:
    """Return the answer, and how many tokens each verification of the draft's tokens gave."""
    answer = server.generate(input_ids=PROMPT, max_new_tokens=4 * DRAFT_TOKENS)
    return answer, answer.meta_info["spec_accept_length"]


def test_a_draft_model_goes_on_from_what_it_stored(tmp_path: Path, store: StoreProcess) -> None:
    model, draft = (make_tiny_llama(tmp_path / name, SHAPE) for name in ("model", "draft"))
    other_draft = make_tiny_llama(tmp_path / "other", SHAPE, seed=1)
    with serve(model, draft, store) as server:
        computed, accepted = ask(server)
        assert from_storage(computed) == 0
        assert len(set(computed.output_ids)) > 3  # else any KV cache would do
        assert accepted > 3  # the draft model computes as the model does
        wait_until_written(server, len(PROMPT) // PAGE_SIZE)
        server.flush()
        restored, accepted_again = ask(server)
        assert from_storage(restored) >= len(PROMPT) - PAGE_SIZE
        assert restored.output_ids == computed.output_ids
        assert accepted_again == accepted
    with serve(model, other_draft, store) as server:
        answer, accepted = ask(server)
        assert from_storage(answer) == 0
        assert answer.output_ids == computed.output_ids
        assert accepted < 2
