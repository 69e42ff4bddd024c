"""Requests and the linker's work end at any moment: aborts, flushes, deadlines, changes of the weights, and stores that
are detached. tests/e2e/test_device_ends.py tests a whole engine."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.metrics import own_metric
from harness.waiting import LoopClock
from sgl_kvfetch.errors import KVFetchError
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import PAGE, Ranks, Request, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")

MOMENTS = ["lookup", "transmit", "staged"]
NO_POLICIES = (None, None)


def arrive_until(rig: Rig, moment: str, tokens: list[int]) -> Request:
    """Let a request arrive, and wait until its prompt is as far as that."""
    rig.store.lookups.is_open = moment != "lookup"
    rig.store.reads.is_open = moment not in ("lookup", "transmit")
    request = rig.arrive(tokens)
    match moment:
        case "lookup":
            rig.settle(lambda: rig.store.lookups.num_waiting > 0)
        case "transmit":
            rig.settle(lambda: rig.store.reads.num_waiting > 0)
        case _:
            rig.await_unparked(request)
    if moment == "admitted":
        assert rig.load_back(request) == len(tokens)
    return request


@pytest.mark.parametrize("is_paused", [False, True], ids=["", "of a paused engine"])
@pytest.mark.parametrize("moment", [*MOMENTS, "admitted"])
def test_an_abort_gives_everything_back(rig: Rig, moment: str, is_paused: bool) -> None:
    rig.stored(prompt(0))
    request = arrive_until(rig, moment, prompt(0))
    rig.step()
    assert own_metric("sgl_kvfetch_parked_requests") == (moment in ("lookup", "transmit"))
    if moment == "admitted":
        slots = rig.cache.linker.private_load_indices[request.rid]
        rig.cache.release_aborted_request(request.cache_request_handle)
        rig.cache.token_to_kv_pool_allocator.free(slots)
        assert rig.cache.ready_to_load_host_cache() == -1
    rig.linker.prefixes.leave(request.rid)
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    if is_paused:  # no step comes before the store is detached
        rig.linker.detach()
    rig.assert_nothing_held()
    assert own_metric("sgl_kvfetch_parked_requests") == 0


@pytest.mark.parametrize("moment", [*MOMENTS, "admitted"])
def test_a_flush_ends_what_is_under_way(rig: Rig, moment: str) -> None:
    rig.stored(prompt(0))
    request = arrive_until(rig, moment, prompt(0))
    flushed, is_parked = own_metric("sgl_kvfetch_device_requests_total", end="flushed"), rig.is_parked(request)
    rig.flush()
    assert own_metric("sgl_kvfetch_device_requests_total", end="flushed") == flushed + is_parked
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    assert not rig.is_parked(request)
    assert request.cache_request_handle in rig.linker.prefixes.take_changed()
    assert rig.cache.ready_to_load_host_cache() == -1
    rig.assert_nothing_held()
    assert all(bool(buffer.isnan().all()) for buffer in rig.pool.k_buffer)
    assert rig.fetch(prompt(0)) == 32


@pytest.mark.parametrize("moment", [*MOMENTS, "admitted"])
@pytest.mark.parametrize("is_aborted", [False, True], ids=["", "and an abort"])
def test_a_switch_to_another_quantiser(rig: Rig, moment: str, is_aborted: bool) -> None:
    """Requests that are parked go on without the store. What is staged is loaded from where it lies."""
    rig.stored(prompt(0))
    request = arrive_until(rig, moment, prompt(0))
    await_switch = rig.switch()
    if is_aborted and moment == "admitted":
        assert rig.linker.cancel_queued_load(request.rid)
        rig.flush()
    elif is_aborted:
        rig.linker.prefixes.leave(request.rid)
    elif moment == "admitted":
        rig.linker.layer_done_counter.set_consumer(rig.cache.ready_to_load_host_cache())
        for layer in range(len(rig.pool.k_buffer)):
            rig.linker.layer_done_counter.wait_until(layer)
        assert not rig.cache.finish_external_linker_loads([request])
        rig.flush()
    else:
        rig.await_unparked(request)
        assert rig.admit(request) == [32 if moment == "staged" else 0]
        assert rig.holds(prompt(0), 32)
    second = rig.arrive(prompt(0, 9))
    rig.await_unparked(second)  # at once, while the data plane ends, or when the next one serves
    rig.linker.prefixes.leave(second.rid)
    await_switch()
    rig.flush()
    assert rig.fetch(prompt(0)) == 0
    rig.write_all()
    rig.flush()
    assert rig.fetch(prompt(0)) == 32


def test_a_flush_leaves_no_bytes_behind(make: MakeRig) -> None:
    """Bytes of a partly used span are kept for a request that continues there, but only until a flush."""
    rig = make()
    rig.stored(prompt(0))
    assert rig.fetch(prompt(0)[:20]) == 20
    first = list(rig.store.data_reads)
    rig.flush()
    rig.store.data_reads.clear()
    assert rig.fetch(prompt(0)[:20]) == 20
    assert sorted(rig.store.data_reads) == sorted(first)


def test_all_requests_behind_a_store_that_hangs_go_on_at_one_deadline(make: MakeRig) -> None:
    rig = make(device={"pool_share": 16 * PAGE / 256})  # two at a time
    prompts = [rig.stored(prompt(seed)) for seed in range(6)]
    rig.store.reads.is_open = False
    requests = [rig.arrive(tokens) for tokens in prompts]
    rig.settle(lambda: rig.service._stager._turns.pages_ahead == 6 * 8 and rig.store.reads.num_waiting > 0)

    async def pass_deadline() -> None:
        await LoopClock().advance(600)

    rig.served.run(pass_deadline())
    rig.await_unparked(*requests)
    assert rig.admit(*requests[:3]) == [0, 0, 0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_loaded_after_the_weights_changed(make: MakeRig, moment: str) -> None:
    rig = make()
    rig.stored(prompt(0))
    request = arrive_until(rig, moment, prompt(0))
    rig.parts.access.suspend("other weights")
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    rig.await_unparked(request)
    assert rig.admit(request) == [0]
    rig.step()
    assert not rig.cache.linker.pending_offloads
    assert not rig.is_parked(rig.arrive(prompt(1)))


def test_a_device_that_does_not_end_its_reads_keeps_the_pools_memory(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    monkeypatch.setattr(rig.linker._pages, "wait_until_unused", lambda timeout_s: False)
    with pytest.raises(KVFetchError, match="memory was not released: the device still reads the KV pool"):
        rig.linker.stop_using_pool()


# Attaching and detaching a store


def test_what_cannot_be_attached_is_refused(make: MakeRig) -> None:
    rig = make()
    for backend, policies, message in (
        ("file", NO_POLICIES, "accepts only the storage backend kvfetch"),
        ("kvfetch", ("timeout", None), "no policies"),
        ("kvfetch", NO_POLICIES, "detach it first"),
    ):
        is_attached, said = rig.linker.attach(backend, '{"store": "http://elsewhere"}', policies)
        assert not is_attached
        assert message in said
    assert rig.linker.attach("kvfetch", rig.parts.extra_config, NO_POLICIES)[0]  # which it is already


def test_all_ranks_attach_or_none(make: MakeRig) -> None:
    ranks = Ranks(2)
    rigs = [make(rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    text = rigs[0].parts.extra_config

    def change(rank: int, history: list[Any]) -> None:
        linker = rigs[rank].linker
        linker.detach()
        connect, of_rank = linker.connect, text if rank == 0 else "@/absent.json"
        choose_profile = Mock(side_effect=lambda _: linker._agree(torch.ones(1)))  # as for `klt`, all together
        refuse = Mock(side_effect=OSError("no such file"))
        attempts = (of_rank, choose_profile), (text, refuse if rank else connect), (text, connect)
        for extra_config, linker.__dict__["connect"] in attempts:
            history.append(linker.attach("kvfetch", extra_config, NO_POLICIES))

    (*ours, then), ((_, first), second, _) = ranks.run(change)
    assert ours == 2 * [(False, "another rank could not attach the storage backend; see its log for the reason")]
    assert "'@/absent.json' cannot be read" in first
    assert second == (False, "OSError: no such file")
    assert then == (True, "kvfetch is attached.")


def test_detaching_gives_back_the_locks_of_copies(rig: Rig) -> None:
    text = rig.parts.extra_config
    rig.fill_queue()  # copies wait for room
    rig.compute(prompt(0))
    rig.step()
    assert rig.cache.protected_size() == 32
    rig.linker.detach()
    rig.step()
    rig.cache.check_hicache_events()
    assert rig.cache.protected_size() == 0
    assert rig.holds(prompt(0), 32)
    assert rig.linker.attach("kvfetch", text, NO_POLICIES)[0]
    rig.compute(prompt(0))  # its pages do not count as written
    rig.write_all()
    rig.flush()
    assert rig.fetch(prompt(0)) == 32
