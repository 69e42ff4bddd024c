"""Models with short convolutions or linear attention: their states are stored with the KV cache of their pages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_lfm2, make_tiny_qwen3_5
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, ask, from_storage, make_prompt, same_answer
from tests.e2e.device import on_the_gpu_path

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FLOAT32_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # as the rest of the model, so that answers can be compared
# SGLang keeps the state of LFM2 at the end of a prompt alone, and therefore wants pages of one token.
LFM2 = pytest.param(make_tiny_lfm2, 1, {}, id="short convolutions")
# Some of SGLang's kernels run in Triton's interpreter.
QWEN3_5 = pytest.param(make_tiny_qwen3_5, 16, {"TRITON_INTERPRET": "1"}, id="gated delta rule")


@pytest.mark.parametrize("mode", ["host", "device", "on the GPU path"])
@pytest.mark.parametrize(("make_model", "page_size", "env"), [LFM2, QWEN3_5])
def test_a_conversation_goes_on_from_stored_states_after_a_restart(
    make_model: Callable[[Path], Path],
    page_size: int,
    env: dict[str, str],
    mode: str,
    tmp_path: Path,
    store: StoreProcess,
) -> None:
    model = make_model(tmp_path / "model")
    start = make_prompt(0, 256)
    longer = [start + make_prompt(number, 64) for number in (1, 2)]
    mode_args: Callable[[str], list[str]] = hicache_args if mode == "host" else device_args
    if mode == "on the GPU path":
        env = env | on_the_gpu_path(tmp_path / "gpu")
    # Else SGLang fills a third of the memory with slots for states, and has no room for the host's.
    flags = ["--page-size", str(page_size), "--max-mamba-cache-size", "64", *mode_args(store.url)]
    env = env | FLOAT32_STATES
    with SGLangServer(model, extra_args=flags, env=env) as server:
        assert from_storage(ask(server, start)) == 0
        # Under another salt, nothing of it is found.
        expected = [
            server.generate(input_ids=each, max_new_tokens=ANSWER_TOKENS, logprobs=True, cache_salt=f"other {number}")
            for number, each in enumerate(longer)
        ]
        assert [each.cached_tokens for each in expected] == [0, 0]
        wait_until_written(server, (len(start) + sum(map(len, longer))) // page_size)
    with SGLangServer(model, extra_args=flags, env=env) as server:
        with ThreadPoolExecutor(2) as pool:  # in device mode, one fetch serves both
            answers = list(pool.map(partial(ask, server), longer))
        assert ("of scratch memory on the GPU" in server.log()) == (mode == "on the GPU path")
    assert [each.cached_tokens for each in answers] == [len(start)] * 2
    assert max(map(from_storage, answers)) == len(start)  # in host mode, the other one may find it in the host pool
    assert all(map(same_answer, answers, expected))
