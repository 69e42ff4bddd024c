"""How long a request waits for its prefix in host mode. tests/e2e/test_faults.py has whole engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from sgl_kvfetch.plugin import hooks
from sgl_kvfetch.plugin.host.storage import SGLANG_BUDGET, Patience, choose_budget
from tests.plugin.backends import Make, make_cache, make_operation


def test_sglangs_own_budget_is_replaced_and_one_of_the_user_stays() -> None:
    _, _, *budget, _ = HybridCacheController.parse_storage_backend_extra_config("{}")
    assert tuple(budget) == SGLANG_BUDGET
    assert choose_budget(*SGLANG_BUDGET, 30) == (31, 0)
    assert choose_budget(2.0, 0.25, 30) == (2.0, 0.25)


@pytest.mark.parametrize(
    ("cache", "wait_s"),
    [
        (make_cache(), 30),
        (make_cache("wait_complete", 1, 0), 30),
        (make_cache("timeout", 2.0, 0.5), 3.0 - 0.1),  # 2,048 tokens: before SGLang gives up, so that its pages count
        (make_cache("timeout", 0.1, 0.0), 0.05),
    ],
)
def test_a_fetch_ends_before_the_budget_and_within_our_timeout(cache: Any, wait_s: float) -> None:
    assert Patience(cache, 30).deadline_s(make_operation(100, num_tokens=2048)) == pytest.approx(100 + wait_s)


def test_the_reason_says_whether_the_policy_gave_up() -> None:
    assert Patience(make_cache(), 30).reason(make_operation(0, expired=True)) == "policy"
    assert Patience(make_cache(), 30).reason(make_operation(0)) == "cancelled"
    assert Patience(make_cache("best_effort"), 30).reason(make_operation(0)) == "policy"


def test_the_runtime_config_gets_our_budget(make: Make) -> None:
    cache = make_cache()
    cache.cache_controller.storage_backend = make(fetch_timeout_s=20)
    attachment = SimpleNamespace(_cache=cache)
    given = {"prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.25, "enable_storage": True}
    _, ours = hooks.configure_prefetches(attachment, storage_backend="kvfetch", **given)
    budget = {"prefetch_timeout_base": 21.0, "prefetch_timeout_per_ki_token": 0.0}
    assert ours == given | budget | {"storage_backend": "kvfetch", "hicache_storage_pass_prefix_keys": True}
    _, others = hooks.configure_prefetches(attachment, storage_backend="file", **given)
    assert others == given | {"storage_backend": "file"}


def test_a_host_pool_that_loses_pages_is_told_of(make: Make) -> None:
    backend = make()
    for cache, num_told in (
        (make_cache(host_tokens=64), 0),
        (make_cache(host_tokens=63, host_memory_mode="buffer_only"), 0),
        (make_cache(host_tokens=63), 1),
    ):
        backend.be_patient(cache, 1.0, 0.25)
        assert len(backend.unstored) == num_told
