"""Many engines share one store and never take each other's pages."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.keys import NAMESPACE_PATTERN
from tests.e2e.conftest import ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_page_sizes_types_of_kv_and_weights_do_not_mix(
    model: Path, other_model: Path, host: Shared, store: StoreProcess
) -> None:
    """Each engine is asked the same prompt twice, with its own tiers emptied between: first nothing may come from what
    the engines before it stored, then all of it from what it stored itself."""
    prompt = make_prompt(0)
    flags = hicache_args(store.url, codec="zstd")
    assert model.name == other_model.name
    engines: list[tuple[AbstractContextManager[SGLangServer], int, bool]] = [
        (host.attached(store.url, codec="zstd"), 16, True),
        (SGLangServer(model, extra_args=[*flags, "--page-size", "64"]), 64, True),
        (SGLangServer(model, extra_args=[*flags, "--kv-cache-dtype", "fp8_e4m3"]), 16, False),
        (SGLangServer(other_model, extra_args=flags), 16, True),
    ]
    tokens = set()
    for engine, page_size, is_float32 in engines:
        with engine as server:
            first = ask(server, prompt)
            assert from_storage(first) == 0
            wait_until_written(server, len(prompt) // page_size)
            server.flush()
            second = ask(server, prompt)
            assert from_storage(second) >= 0.9 * len(prompt) - page_size
            if is_float32:
                assert same_answer(second, first)
            else:
                assert second.output_ids == first.output_ids
                assert "kv dtype float8_e4m3fn" in server.log()
            tokens.add(tuple(first.output_ids))
    assert len(list(store.directory.glob("*/*.kvm"))) >= len(engines)
    assert len([d for d in store.directory.iterdir() if re.fullmatch(NAMESPACE_PATTERN, d.name)]) == len(engines)
    assert len(tokens) >= 2
