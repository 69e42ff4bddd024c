"""Device mode with SGLang's tree in Rust and in Python: the answers of an engine without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.device import assert_fetched_in_parts
from tests.e2e.faults import PAGES

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("core", ["rust", "python"])
def test_stored_prompts_are_loaded_while_their_batch_computes(
    model: Path, store: StoreProcess, expected: Expected, core: str
) -> None:
    env = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}
    with SGLangServer(model, extra_args=device_args(store.url), env=env) as server:
        for seed in range(2):
            answer = ask(server, make_prompt(seed))
            assert from_storage(answer) == 0
            assert same_answer(answer, expected[seed])
        wait_until_written(server, 2 * PAGES)
        assert_fetched_in_parts(server, expected)
        assert "Using the Python TreeCore" not in server.log()  # SGLang falls back to it, and says so
