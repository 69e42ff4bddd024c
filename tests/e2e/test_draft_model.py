"""Speculation with a draft model, whose KV cache is a side pool, on real SGLang and in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.stand_in_gpu import on_the_gpu_path
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, from_storage

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 2}
PROMPT = list(range(3, 67))
DRAFT_TOKENS = 4


def speculating(algorithm: str, draft: Path | None) -> list[str]:
    """Return the flags for a draft model, or for the model's own draft layer."""
    return [
        *("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1"),  # less to interpret
        *("--speculative-algorithm", algorithm),
        *(() if draft is None else ("--speculative-draft-model-path", str(draft))),
        *("--speculative-num-steps", str(DRAFT_TOKENS - 1), "--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
        *("--speculative-eagle-topk", "1"),
    ]


def answer_of(server: SGLangServer, prompt: list[int], num_tokens: int, **options: Any) -> tuple[Generation, float]:
    """Return the answer, and how many tokens each verification of the draft's tokens gave."""
    answer = server.generate(input_ids=prompt, max_new_tokens=num_tokens, **options)
    return answer, answer.meta_info["spec_accept_length"]


def serve(mode: str, model: Path, draft: Path, store: StoreProcess, **config: Any) -> SGLangServer:
    env = {"TRITON_INTERPRET": "1"}
    if mode == "on the GPU path":
        env |= on_the_gpu_path(model.with_name("gpu"))
    mode_args = hicache_args if mode == "host" else device_args
    flags = [*mode_args(store.url, **config), *speculating("STANDALONE", draft)]
    return SGLangServer(model, extra_args=flags, env=env)


def ask(server: SGLangServer) -> tuple[Generation, float]:
    return answer_of(server, PROMPT, 2 * DRAFT_TOKENS, logprobs=True)


@pytest.mark.parametrize("mode", ["host", "device", "on the GPU path"])
def test_a_draft_model_goes_on_from_what_it_stored(mode: str, tmp_path: Path, store: StoreProcess) -> None:
    model, draft = (make_tiny_llama(tmp_path / name, **SHAPE) for name in ("model", "draft"))
    other_draft = make_tiny_llama(tmp_path / "other", **SHAPE, seed=1)
    with serve(mode, model, draft, store) as server:
        computed, accepted = ask(server)
        assert from_storage(computed) == 0
        assert len(set(computed.output_ids)) > 3  # else any KV cache would do
        assert accepted > 2.5  # the draft model computes as the model does
        wait_until_written(server, len(PROMPT) // PAGE_SIZE)
        server.flush()
        restored, accepted_again = ask(server)
        assert from_storage(restored) >= len(PROMPT) - PAGE_SIZE
        assert restored.output_ids == computed.output_ids
        assert accepted_again == accepted
    with serve(mode, model, other_draft, store) as server:
        answer, accepted = ask(server)
        assert from_storage(answer) == 0
        assert answer.output_ids == computed.output_ids
        assert accepted < 1.5
