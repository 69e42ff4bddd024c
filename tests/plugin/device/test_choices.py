"""Which prefixes are staged, and which pages are written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.metrics import own_metric
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.engine import data_plane
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.choice import FetchOrder
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device import waiting_queue
from sgl_kvfetch.plugin.device.waiting_queue import WaitingQueue
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Request, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def fetched(rig: Rig, tokens: list[int], *, is_idle: bool = False) -> int:
    rig.flush()
    return rig.fetch(tokens, is_idle=is_idle)


def compute_at(rig: Rig, seconds_per_token: float) -> None:
    for num_tokens in range(10_000, 50_000, 1000):
        rig.linker.prefill_meter.speed.add_batch(num_tokens, num_tokens * seconds_per_token)


def test_a_prefix_that_is_computed_faster_is_not_fetched(make: MakeRig) -> None:
    """Unless it would wait for an engine that is busy with other prompts."""
    rig = make(recompute="auto")
    tokens = rig.stored(prompt(0))
    assert fetched(rig, tokens) == 32  # nothing is measured yet
    compute_at(rig, 1e-9)
    before = own_metric("sgl_kvfetch_device_requests_total", end="recomputed")
    assert fetched(rig, tokens) == 0
    assert own_metric("sgl_kvfetch_device_requests_total", end="recomputed") == before + 1
    rig.service._prompts.order.engine.add(WAIT_S, time.monotonic())
    assert fetched(rig, tokens) == 32
    assert fetched(rig, tokens, is_idle=True) == 0
    compute_at(rig, 1.0)
    assert fetched(rig, tokens, is_idle=True) == 32


def test_how_late_fetches_end_counts(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests would wait for a data plane that is slower than the engine."""
    landed = FetchOrder.landed
    monkeypatch.setattr(FetchOrder, "landed", lambda order, now_s, expected_s: landed(order, now_s, expected_s - 1e3))
    rig = make(recompute="auto")
    tokens = rig.stored(prompt(0))
    assert fetched(rig, tokens) == 32
    compute_at(rig, 1.0)
    assert fetched(rig, tokens) == 0


def test_an_engine_is_idle_while_all_requests_are_parked() -> None:
    seen: list[bool] = []
    linker = SimpleNamespace(arrive=lambda *args, is_idle: seen.append(is_idle))
    for queued, running in (("", []), ("parked", []), ("ready", []), ("", ["a request"])):
        queue = WaitingQueue(lambda handle: handle.rid == "parked", [Request(queued, [])] if queued else [])
        batches = {"running_batch": SimpleNamespace(reqs=[]), "last_batch": SimpleNamespace(reqs=running)}
        scheduler = SimpleNamespace(tree_cache=None, waiting_queue=queue, chunked_req=None, **batches)
        waiting_queue._arrive(scheduler, cast("Any", linker), SimpleNamespace())
    assert seen == [True, True, False, False]


def test_prompts_below_the_threshold_are_not_looked_up(make: MakeRig) -> None:
    rig = make(prefetch_threshold=33)
    rig.stored(prompt(0))
    num_lookups = rig.store.num_lookups
    request = rig.arrive(prompt(0))
    assert not rig.is_parked(request)
    assert rig.admit(request) == [0]
    assert rig.store.num_lookups == num_lookups


def test_pages_are_written_once_unless_a_data_plane_may_have_lost_them(rig: Rig) -> None:
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
    rig.parts.plane.num_losses += 1  # as if it had been killed just now
    rig.compute(prompt(1))
    rig.write_all()
    rig.evict()
    rig.compute(tokens)
    rig.write_all()
    assert own_metric("sgl_kvfetch_written_pages_total") == written + 4 + 8 + 12


def test_pages_that_could_not_be_written_are_written_once_they_can(rig: Rig) -> None:
    """They stay in the tree: SGLang must not take them for stored."""
    text, written = rig.parts.extra_config, own_metric("sgl_kvfetch_written_pages_total")
    weight_updates.weights_change("an update")
    rig.flush()
    weight_updates.tree_is_empty()
    rig.compute(prompt(0))
    rig.write_all()
    rig.linker.detach()
    rig.compute(prompt(1))  # while no store is attached
    assert rig.linker.attach("kvfetch", text, ())[0]
    assert own_metric("sgl_kvfetch_written_pages_total") == written
    for seed in range(2):
        rig.compute(prompt(seed))
    rig.write_all()
    assert own_metric("sgl_kvfetch_written_pages_total") == written + 16
    assert [fetched(rig, prompt(seed)) for seed in range(2)] == [32, 32]


@pytest.mark.parametrize("is_cleared", [True, False], ids=["the store is cleared", "another quantiser"])
def test_pages_that_a_store_has_no_more_are_written_again_with_those_behind_them(rig: Rig, is_cleared: bool) -> None:
    """Also those that SGLang has in its tree since before."""
    tokens = prompt(0, 12)
    rig.compute(tokens[:32])
    rig.write_all()
    if is_cleared:
        assert rig.linker.clear()
    else:
        rig.switch()()
    rig.compute(tokens)
    rig.write_all()
    assert fetched(rig, tokens) == 48


Full = tuple[Rig, list[int], Callable[[], None]]
STORED = prompt(9, 24)


@pytest.fixture
def full(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Full:
    """Return a rank whose write queue is full, and where nobody waits long for its room; a list to which the size of
    each piece is added that it has no room for; and what frees it. The pool has room for three short prompts."""
    monkeypatch.setattr(data_plane, "_WRITE_S", 0.01)
    monkeypatch.setattr(data_plane, "_NO_ROOM_S", math.inf)
    rig = make(write_queue_bytes=1 << 20, num_slots=124)
    rig.stored(STORED)
    free, refusals = rig.fill_queue(), list[int]()
    room = rig.parts.plane._peer._room
    allocate = room.allocate

    def noted(num_bytes: int, timeout_s: float | None = None) -> int | None:
        offset = allocate(num_bytes, timeout_s)
        if offset is None:
            refusals.append(num_bytes)
        return offset

    monkeypatch.setattr(room, "allocate", noted)
    return rig, refusals, free


@pytest.mark.parametrize("is_wanted", [False, True], ids=["", "others need the pool"])
def test_pages_wait_in_the_pool_for_room_in_the_write_queue(is_wanted: bool, full: Full) -> None:
    rig, refusals, free = full
    rig.compute(prompt(0))
    rig.settle(lambda: len(refusals) > 3)
    assert rig.cache.linker.pending_offloads
    if is_wanted:
        rig.compute(prompt(1))
        rig.settle(lambda: len(rig.cache.linker.pending_offloads) < 2)
    free()
    if is_wanted:  # dropped pages are written when they come again
        rig.compute(prompt(0))
    rig.write_all()
    assert fetched(rig, prompt(0)) == 32


def test_they_do_not_wait_each_for_a_queue_that_stays_full(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a store hangs: half of the pool would be of no use to others for as long."""
    monkeypatch.setattr(data_plane, "_NO_ROOM_S", 1.0)
    rig, refusals, _ = full
    for seed in range(2):
        num_refusals = len(refusals)
        rig.compute(prompt(seed))
        rig.settle(lambda: not rig.cache.linker.pending_offloads)
        assert (len(refusals) == num_refusals + 1) == (seed > 0)


def test_they_do_not_wait_while_the_store_takes_none(full: Full) -> None:
    rig, _, free = full
    free()
    rig.store.puts.error = StoreError("timeout", "as told")
    rig.compute(prompt(0))
    rig.write_all()
    wait_until(lambda: not rig.parts.plane._peer._room._taken)
    rig.fill_queue()
    rig.compute(prompt(1))
    rig.settle(lambda: not rig.cache.linker.pending_offloads)


@pytest.mark.parametrize(("tokens", "preempts"), [(STORED, False), (STORED, True), (prompt(1, 24), False)])
def test_they_do_not_wait_where_the_next_request_needs_room(tokens: list[int], preempts: bool, full: Full) -> None:
    """SGLang lets all wait behind a request for which there is no room, unless it preempts."""
    rig, refusals, _ = full
    rig.compute(prompt(0))
    rig.settle(lambda: len(refusals) > 3)
    scheduler = SimpleNamespace(
        tree_cache=rig.cache,
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[Request("runs", [0])]),
        last_batch=None,
        chunked_req=None,
        new_token_ratio_tracker=SimpleNamespace(current=1.0),
        enable_overlap=False,
        enable_priority_preemption=preempts,
    )
    held: list[bool] = []

    def step() -> bool:
        rig.cache.check_hicache_events()
        waiting_queue.form_batch(lambda scheduler: None, scheduler)
        held.append(rig.linker.prefixes.has_held)
        return not rig.cache.linker.pending_offloads

    assert not step()
    scheduler.waiting_queue.append(Request("waits", [*tokens, 1]))  # parked at once, until it is staged
    wait_until(step, poll_s=0.001)
    assert any(held) == (tokens is STORED and not preempts)
    assert scheduler.waiting_queue
