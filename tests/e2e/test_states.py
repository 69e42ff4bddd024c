"""Models with short convolutions or linear attention: their states are stored with the KV cache of their pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import written
from harness.models import make_tiny_lfm2, make_tiny_qwen3_5
from harness.store_process import StoreProcess
from tests.e2e.conftest import ask, from_storage, make_prompt, same_answer
from tests.e2e.device import ON_THE_GPU_PATH

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FLOAT32_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # as the rest of the model, so that answers can be compared
# SGLang keeps the state of LFM2 at the end of a prompt alone, and therefore wants pages of one token.
LFM2 = pytest.param(make_tiny_lfm2, 1, {}, id="short convolutions")
# Some of SGLang's kernels run in Triton's interpreter.
QWEN3_5 = pytest.param(make_tiny_qwen3_5, 16, {"TRITON_INTERPRET": "1"}, id="gated delta rule")
START = 256  # tokens


@pytest.mark.parametrize(("make_model", "page_size", "env"), [LFM2, QWEN3_5])
def test_a_conversation_goes_on_from_the_states_that_another_server_has_stored(
    make_model: Callable[[Path], Path], page_size: int, env: dict[str, str], tmp_path: Path, store: StoreProcess
) -> None:
    modes = "host", "device", "on the GPU path", "host"
    goes_on_from_one_server_to_the_next(make_model, page_size, env, tmp_path, store, modes)


def goes_on_from_one_server_to_the_next(
    make_model: Callable[[Path], Path],
    page_size: int,
    env: dict[str, str],
    tmp_path: Path,
    store: StoreProcess,
    modes: Sequence[str],
) -> None:
    """Start servers one after the other. All but the first go on from what the one before it has stored."""
    model = make_model(tmp_path / "model")
    stored: tuple[list[list[int]], list[Generation]] = [], []  # prompts whose start is stored, and their answers
    for number, mode in enumerate(modes):
        mode_args: Callable[[str], list[str]] = hicache_args if mode == "host" else device_args
        # Else SGLang fills a third of the memory with slots for states, and has no room for the host's.
        flags = ["--page-size", str(page_size), "--max-mamba-cache-size", "64", *mode_args(store.url)]
        first = ON_THE_GPU_PATH if mode == "on the GPU path" else ""
        with SGLangServer(model, extra_args=flags, env=env | FLOAT32_STATES, first=first) as server:
            assert ("of scratch memory on the GPU" in server.log()) == (mode == "on the GPU path")
            if number > 0:
                with ThreadPoolExecutor(2) as pool:  # in device mode, one fetch serves both
                    answers = list(pool.map(partial(ask, server), stored[0]))
                assert [each.cached_tokens for each in answers] == [START] * 2
                # In host mode, the other one may find it in the host pool.
                assert max(map(from_storage, answers)) == START
                assert all(map(same_answer, answers, stored[1]))
            if number + 1 < len(modes):
                start = make_prompt(3 * number, START)
                longer = [start + make_prompt(3 * number + i, 64) for i in (1, 2)]
                with written(server, (len(start) + sum(map(len, longer))) // page_size):
                    assert from_storage(ask(server, start)) == 0
                    # Under another salt, nothing of it is found.
                    expected = [
                        server.generate(input_ids=each, max_new_tokens=12, logprobs=True, cache_salt=f"other {i}")
                        for i, each in enumerate(longer)
                    ]
                    assert [each.cached_tokens for each in expected] == [0, 0]
                stored = longer, expected
