"""Attaching and detaching a store while the engine serves. tests/e2e/test_device_ends.py tests a whole engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler

from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.errors import ConfigError, KVFetchError
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device import scheduler_hooks
from sgl_kvfetch.plugin.device.fetch_state import State
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Ranks, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())


def connectable(rig: Rig, fault: Exception | None = None) -> Rig:
    """Can be attached again, to the same store; or cannot, for this reason."""

    def connect(extra_config: str | None) -> None:
        if fault is not None:
            raise fault
        rig.backend = rig.connect()
        weight_updates.register_access(rig.backend.access, None)

    rig.cache.set_connect(connect)
    rig.cache._extra_config = "{}"
    return rig


def attach(rig: Rig, config: str | None = "{}", backend: str = "kvfetch", **policies: str) -> tuple[bool, str]:
    return rig.cache.attach_storage_backend(backend, config, "a model", **policies)


def kvfetch_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvfetch")}


def is_fetched(rig: Rig, tokens: list[int]) -> bool:
    handle = rig.arrive(tokens)
    rig.await_over(handle)
    _, loaded, lock = rig.admit(handle, tokens)
    rig.cache.unlock(lock)
    return loaded == len(tokens) and rig.holds(tokens, loaded)


def test_a_detached_cache_is_a_plain_one_until_it_is_attached_again(make: MakeRig) -> None:
    before = kvfetch_threads()
    rig = connectable(make())
    rig.stored(prompt(0))
    assert rig.cache.detach_storage_backend() == (True, "kvfetch is detached.")
    wait_until(lambda: kvfetch_threads() <= before)
    num_lookups = rig.store.num_lookups
    assert rig.cache.check_prefetch_progress(rig.arrive(prompt(0)))
    node = rig.compute(prompt(1))
    assert rig.store.num_lookups == num_lookups
    assert rig.cache.detach_storage_backend()[0]
    assert attach(rig) == (True, "kvfetch is attached.")
    assert is_fetched(rig, prompt(0))
    # Pages that were computed in the meantime have hashes now, and the next request that ends writes them.
    rig.parts.writes.inserted("r", node)
    rig.write_all()
    rig.flush()
    assert is_fetched(rig, prompt(1))
    rig.assert_nothing_held()


@pytest.mark.parametrize("state", [State.LOOKUP, State.WAITING, State.FOLLOWING, State.AWAITING_BYTES, State.LANDED])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_detaching_ends_what_is_under_way(make: MakeRig, state: State, is_aborted: bool) -> None:
    rig = connectable(make(device={"round_tokens": 16}))
    shared, other = prompt(0), prompt(2)
    rig.stored(shared)
    rig.stored(other)
    rig.compute(prompt(1))
    rig.write_all()
    rig.store.lookups.is_open = state is not State.LOOKUP
    rig.store.reads.is_open = state is State.LANDED
    handles = [rig.arrive(shared)]
    if state in (State.WAITING, State.FOLLOWING):
        rig.settle(lambda: rig.states() == [State.AWAITING_BYTES])  # of the second round
        handles.append(rig.arrive(other if state is State.WAITING else shared))
    rig.settle(lambda: rig.states()[-1:] == [state])
    if is_aborted:
        for handle in handles:
            rig.abort(handle)
    rig.cache.detach_storage_backend()
    assert all(rig.cache.check_prefetch_progress(handle) for handle in handles)
    assert set(rig.cache.take_changed()) >= (set() if is_aborted else set(handles))
    assert rig.cache.protected_size() == 0
    assert rig.num_available + rig.cache.evictable_size() == rig.num_slots
    assert rig.holds(prompt(1), 32)  # the tree stays
    assert attach(rig)[0]
    assert is_fetched(rig, shared) is (state is not State.LANDED)
    rig.assert_nothing_held()


def test_detaching_gives_back_the_locks_of_copies(make: MakeRig) -> None:
    rig = connectable(make(write_queue_bytes=1 << 20))
    assert rig.service.client.writer.reserve(1 << 20, 0)  # copies wait for room
    rig.compute(prompt(0))
    assert rig.cache.protected_size() == 32
    rig.cache.end_cache_operations()
    assert rig.cache.protected_size() == 0
    rig.service.client.writer.release(1 << 20)
    rig.compute(prompt(0)[:16] + prompt(1)[:16])  # and its pages do not count as written
    rig.write_all()
    rig.flush()
    assert is_fetched(rig, (prompt(0)[:16] + prompt(1)[:16]))
    rig.assert_nothing_held()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "file"}, "accepts only the storage backend kvfetch"),
        ({"hicache_write_policy": "write_back"}, "no policies"),
        ({"hicache_storage_prefetch_policy": "timeout"}, "no policies"),
    ],
)
def test_unsupported_arguments_are_refused(rig: Rig, arguments: dict[str, Any], message: str) -> None:
    connectable(rig).cache.detach_storage_backend()
    is_attached, said = attach(rig, **arguments)
    assert not is_attached
    assert message in said


def test_attaching_twice(rig: Rig) -> None:
    connectable(rig)
    assert attach(rig) == attach(rig, None) == (True, "kvfetch is already attached with this config.")
    is_attached, said = attach(rig, '{"store": "file:///elsewhere"}')
    assert not is_attached
    assert "detach it first" in said


def test_pages_of_former_weights_are_not_stored_as_new_ones(rig: Rig) -> None:
    connectable(rig)
    rig.compute(prompt(0))
    rig.settle()
    weight_updates.weights_change("an update")
    rig.cache.detach_storage_backend()
    is_attached, said = attach(rig)
    assert not is_attached
    assert "/flush_cache" in said
    rig.flush()
    assert attach(rig)[0]


def test_a_detached_backend_is_not_suspended(make: MakeRig) -> None:
    rig = connectable(make())
    weight_updates.register_access(rig.backend.access, None)
    rig.cache.detach_storage_backend()
    weight_updates.weights_change("an update")
    assert rig.backend.access.reads


@pytest.mark.parametrize("fault", [ConfigError("no such key"), OSError("no such file")])
def test_all_ranks_attach_or_none(make: MakeRig, fault: Exception) -> None:
    others = kvfetch_threads()
    ranks = Ranks(2)
    rigs = [make(rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    own = kvfetch_threads() - others
    answers: list[tuple[bool, str]] = [(True, ""), (True, "")]

    def change(rank: int) -> None:
        rig = connectable(rigs[rank], fault if rank == 1 else None)
        rig.cache.detach_storage_backend()
        answers[rank] = attach(rig)

    threads = [threading.Thread(target=change, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [is_attached for is_attached, _ in answers] == [False, False]
    assert "another rank" in answers[0][1]
    assert str(fault) in answers[1][1]
    assert all(rig.cache.check_prefetch_progress(rig.arrive(prompt(0))) for rig in rigs)
    wait_until(lambda: not kvfetch_threads() & own)


class SchedulerOfOurs:
    """The part of SGLang's scheduler that its own attaching and detaching uses."""

    def __init__(self, rig: Rig) -> None:
        self.tree_cache = rig.cache
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.enable_hierarchical_cache = False
        self.enable_hicache_storage = True
        self._engine_paused = False

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        return scheduler_hooks.count_pending(not self.waiting_queue, self, for_health_check, ignore_waiting)


def test_sglang_detaches_and_attaches(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides: list[dict[str, Any]] = []
    context = SimpleNamespace(override=lambda source, **fields: overrides.append(fields))
    monkeypatch.setattr("sglang.srt.managers.scheduler.get_context", lambda: context)
    monkeypatch.setattr(
        "sglang.srt.managers.scheduler.get_serving", lambda: SimpleNamespace(served_model_name="a model")
    )
    scheduler = SchedulerOfOurs(connectable(rig))
    rig.stored(prompt(0))
    rig.store.reads.is_open = False
    handle = rig.arrive(prompt(0))
    rig.settle(lambda: rig.states() == [State.FILLING])

    scheduler.waiting_queue.append(handle)
    detached = scheduler_hooks.detach_store(Scheduler.detach_hicache_storage_wrapped, scheduler, None)
    assert not detached.success
    assert "not idle" in detached.message
    assert rig.states() == [State.FILLING]  # a refusal changes nothing

    rig.abort(scheduler.waiting_queue.pop())
    assert rig.cache.has_pending_cache_operations()
    detached = scheduler_hooks.detach_store(Scheduler.detach_hicache_storage_wrapped, scheduler, None)
    assert detached.success
    assert not scheduler.enable_hicache_storage
    assert overrides[-1] == {"hicache_storage_backend": None, "hicache_storage_backend_extra_config": None}

    request = SimpleNamespace(
        hicache_storage_backend="kvfetch",
        hicache_storage_backend_extra_config_json="{}",
        hicache_storage_prefetch_policy=None,
        hicache_write_policy=None,
    )
    attached = scheduler_hooks.attach_store(Scheduler.attach_hicache_storage_wrapped, scheduler, request)
    assert attached.success
    assert scheduler.enable_hicache_storage
    assert not scheduler.enable_hierarchical_cache
    assert overrides[-1]["hicache_storage_backend"] == "kvfetch"
    assert is_fetched(rig, prompt(0))
    rig.assert_nothing_held()


def test_the_pools_memory_goes_only_when_nothing_uses_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.stored(prompt(0))
    rig.store.reads.is_open = False
    handle = rig.arrive(prompt(0))
    rig.settle(lambda: rig.states() == [State.FILLING])
    rig.compute(prompt(1))
    manager = SimpleNamespace(scheduler=SchedulerOfOurs(rig))
    pages = rig.backend.pages
    waited: list[bool] = []

    def wait_until_unused(timeout_s: float) -> bool:
        assert 1 < timeout_s < 600
        waited.append(rig.cache.has_pending_cache_operations())
        return len(waited) < 3

    monkeypatch.setattr(pages, "wait_until_unused", wait_until_unused)
    scheduler_hooks.stop_using_pool(manager, None)
    assert waited == [False]
    assert rig.cache.check_prefetch_progress(handle)
    rig.cache.detach_storage_backend()
    scheduler_hooks.stop_using_pool(manager, None)  # what was launched before may still run
    with pytest.raises(KVFetchError, match="memory was not released: the GPU still reads or writes the KV pool"):
        scheduler_hooks.stop_using_pool(manager, None)
    manager.scheduler.tree_cache = SimpleNamespace()  # not ours
    scheduler_hooks.stop_using_pool(manager, None)
