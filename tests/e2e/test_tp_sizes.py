"""Servers of one TP size read what those of another wrote, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = 640 // PAGE_SIZE


@pytest.mark.parametrize(("mode", "args"), [("host", hicache_args), ("device", device_args)])
def test_ranks_read_their_heads_of_what_others_wrote(
    mode: str,
    args: Callable[..., list[str]],
    model: Path,
    store: StoreProcess,
    expected: Expected,
    request: pytest.FixtureRequest,
) -> None:
    config: dict[str, Any] = {"quantiser": "exact", "codec": "zstd", "lookup_timeout_s": 20}
    shared: Shared = request.getfixturevalue(mode)
    two_flags, env = [*args(store.url, **config), "--tp-size", "2"], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

    def is_fetched(server: SGLangServer, seed: int) -> bool:
        answer = ask(server, make_prompt(seed))
        assert from_storage(answer) >= 0.9 * 640
        return same_answer(answer, expected[seed])

    with shared.attached(store.url, **config) as one:
        assert from_storage(ask(one, make_prompt(0))) == 0
        wait_until_written(one, PAGES)
        raw_bytes = read_metric(one.metrics(), "sgl_kvfetch_wire_bytes_total", direction="write")

    with SGLangServer(model, extra_args=two_flags, env=env) as two:
        assert is_fetched(two, 0)
        # Both ranks together have read each byte once.
        assert read_metric(two.metrics(), "sgl_kvfetch_wire_bytes_total", direction="read") <= raw_bytes
        computed = ask(two, make_prompt(1))
        assert from_storage(computed) == 0
        assert same_answer(computed, expected[1])
        wait_until_written(two, 2 * PAGES)
        # A prefix of which each TP size has written a part.
        ask(two, make_prompt(0) + make_prompt(2, 320))
        wait_until_written(two, 2 * (PAGES + 320 // PAGE_SIZE))
        two.flush()
        assert is_fetched(two, 1)

    with shared.attached(store.url, **config) as one:
        assert is_fetched(one, 1)
        answer = ask(one, make_prompt(0) + make_prompt(2, 320))
        assert from_storage(answer) >= 0.9 * 960
        assert read_metric(one.metrics(), "sgl_kvfetch_misses_total") == 0
