"""Which prefixes are staged, and which pages are written."""

from __future__ import annotations

import pytest

from harness.metrics import own_metric
from tests.plugin.device.rig import prompt
from tests.plugin.linker.conftest import MakeRig
from tests.plugin.linker.rig import Rig

pytestmark = pytest.mark.filterwarnings("ignore")

COMPUTED = (10_000, 20_000, 30_000, 40_000)  # tokens of batches


def test_a_prefix_that_is_computed_faster_is_not_fetched(make: MakeRig) -> None:
    rig, tokens = make(recompute="auto"), prompt(0)
    rig.stored(tokens)
    assert fetched(rig, tokens) == 32  # nothing is measured yet
    speed = rig.linker.prefill_meter.speed
    for num_tokens in COMPUTED:
        speed.add_batch(num_tokens, num_tokens * 1e-9)
    before = own_metric("sgl_kvfetch_device_requests_total", end="recomputed")
    assert fetched(rig, tokens) == 0
    assert own_metric("sgl_kvfetch_device_requests_total", end="recomputed") == before + 1
    for num_tokens in range(10_000, 40_000, 1000):
        speed.add_batch(num_tokens, num_tokens * 1.0)
    assert fetched(rig, tokens) == 32
    rig.assert_nothing_held()


def fetched(rig: Rig, tokens: list[int]) -> int:
    rig.flush()
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    (num_tokens,) = rig.admit(request)
    return num_tokens


def test_prompts_below_the_threshold_are_not_looked_up(make: MakeRig) -> None:
    rig = make(prefetch_threshold=33)
    rig.stored(prompt(0))
    num_lookups = rig.store.num_lookups
    request = rig.arrive(prompt(0))
    assert not rig.is_parked(request)
    assert rig.admit(request) == [0]
    assert rig.store.num_lookups == num_lookups


def test_pages_are_written_only_once(rig: Rig) -> None:
    tokens = prompt(0, 12)
    rig.compute(tokens[:32])
    rig.write_all()
    written = own_metric("sgl_kvfetch_written_pages_total")
    rig.evict()
    rig.compute(tokens[:32])
    rig.write_all()
    assert own_metric("sgl_kvfetch_written_pages_total") == written
    rig.compute(tokens)
    rig.write_all()
    assert own_metric("sgl_kvfetch_written_pages_total") == written + 4


def test_pages_that_a_data_plane_may_have_lost_are_written_again(rig: Rig) -> None:
    tokens = prompt(0)
    rig.compute(tokens)
    rig.write_all()
    rig.parts.plane.num_losses += 1  # as if it had been killed just now
    rig.compute(prompt(1))
    rig.write_all()
    rig.evict()
    written = own_metric("sgl_kvfetch_written_pages_total")
    rig.compute(tokens)
    rig.write_all()
    assert own_metric("sgl_kvfetch_written_pages_total") == written + 8
