"""What is stored comes back, and answers do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.quant.registry import make_quantiser
from tests.e2e.conftest import Expected, ask, assert_computed, assert_fetched, from_storage, make_prompt
from tests.e2e.continuation import continue_by_layers
from tests.e2e.faults import PAGES, compute_and_store
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_exact(model: Path, host: Shared, store: StoreProcess, expected: Expected) -> None:
    """The first server is started as users start one. Those of other tests find SGLang imported."""
    config: dict[str, Any] = {"quantiser": "exact", "codec": "hevc"}
    flags = hicache_args(store.url, prefetch_policy=None, **config)
    with SGLangServer(model, extra_args=flags, imports_itself=True) as writer:
        assert f"prefetch policy is timeout: a request waits for its stored prefix at most {WAIT_S:g} s" in writer.log()
        compute_and_store(writer, expected)

    with host.attached(store.url, **config) as reader:
        for seed in range(2):
            assert_fetched(reader, seed, expected[seed])

        # A prefix that ends inside a stored segment, and goes on differently.
        reader.flush()
        answer = ask(reader, make_prompt(0)[:416] + make_prompt(7)[:224])
        assert from_storage(answer) == 416
        metrics = reader.metrics()
        assert read_metric(metrics, "sgl_kvfetch_misses_total") == 0
        assert read_metric(metrics, "sgl_kvfetch_wire_bytes_total", direction="read") > 0

        # Cleared through SGLang's own endpoint, the store has nothing left for anyone.
        reader.flush()
        reader.request("POST", "/hicache/storage-backend/clear")
        assert_computed(reader, 1, expected[1])


def test_quantised(model: Path, host: Shared, store: StoreProcess) -> None:
    """SGLang goes on from the restored pages as transformers does from the same KV, quantised and dequantised in
    memory. Both compute in float32: the tolerance is far above what the two implementations' sums differ by, and far
    below what quantising does, as the comparison with the computed answer shows."""
    prompt = make_prompt(0)
    with host.attached(store.url, quantiser="cachegen", codec="hevc420") as server:
        computed = ask(server, prompt)
        wait_until_written(server, PAGES)
        server.flush()
        answer = ask(server, prompt)
    num_cached = from_storage(answer)
    assert num_cached >= 0.9 * 640
    tokens, logprobs = continue_by_layers(model, prompt, num_cached, make_quantiser("cachegen"), answer.output_ids)
    assert answer.output_ids == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-3)
    # And that is close to what it would be without a cache.
    assert answer.logprobs[0] == pytest.approx(computed.logprobs[0], abs=3.0)
