"""Requests that compute while their last pages are being restored."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from harness.waiting import WAIT_S
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.plane.fetch import fetcher
from sgl_kvfetch.plane.fetch.restore import restore_cell
from sgl_kvfetch.plane.fetch.sink import IsFinished, LayerProgress
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device import cache, early, scheduler_hooks
from sgl_kvfetch.plugin.device.fetch_state import State
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import HEADS, LAYERS, PAGE, Rig, page_values, prompt

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_PAGES = 8
NUM_STORED = NUM_PAGES - 1


@dataclass
class Decoding:
    """Decodes layer groups of the last span only when told to, or fails to."""

    gates: dict[int, threading.Event] = field(default_factory=lambda: {0: threading.Event(), 1: threading.Event()})
    fails_at: int | None = None

    def restore(
        self, original: Callable[..., Future[IsFinished]], reader: Any, cell: Any, *args: Any, **kwargs: Any
    ) -> Future[IsFinished]:
        if reader.manifest.first_page + reader.manifest.span_range(cell.span)[1] == NUM_STORED:
            assert self.gates[cell.layer_group].wait(WAIT_S)
            if cell.layer_group == self.fails_at:
                raise CorruptError("as told")
        return original(reader, cell, *args, **kwargs)

    def open(self, *groups: int) -> None:
        for group in groups:
            self.gates[group].set()


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    made, original = Decoding(), restore_cell
    monkeypatch.setattr(fetcher, "restore_cell", lambda *args, **kwargs: made.restore(original, *args, **kwargs))
    yield made
    made.open(0, 1)


@dataclass
class Request:
    """What SGLang keeps of a request, as far as the cache looks at it."""

    tokens: list[int]
    cache_request_handle: CacheRequestHandle
    prefix_len: int = 0
    last_node: Any = None
    extra_key: None = None
    session: None = None
    storage_hit_start: int | None = None
    storage_hit_length: int = 0

    @property
    def rid(self) -> str:
        return self.cache_request_handle.rid

    @property
    def key(self) -> RadixKey:
        return RadixKey(array("q", self.tokens[:-1])).page_aligned(PAGE)  # the last token is always computed


def filled(make: MakeRig, decoding: Decoding) -> tuple[Rig, list[int]]:
    """Return a rig whose store has all pages of a prompt but the last one, and which computes slowly."""
    rig = make(codec_threads=8, device={"early_start": True})  # more than cells that wait
    for num_tokens in (8, 16, 32, 64):
        rig.cache.prefill_meter.speed.add_batch(num_tokens, 1000.0 * num_tokens)
    tokens = prompt(0, NUM_PAGES)
    decoding.open(0, 1)
    rig.stored(tokens[: NUM_STORED * PAGE])
    for gate in decoding.gates.values():
        gate.clear()
    return rig, tokens


def begin(rig: Rig, tokens: list[int]) -> Request:
    return Request(tokens, rig.arrive(tokens[:-1]))


def match(rig: Rig, request: Request) -> int:
    """Match a request as SGLang does when it tries to admit it. Return how many tokens it could load."""
    matched = rig.cache.match_prefix(MatchPrefixParams(key=request.key, req=request))
    request.prefix_len, request.last_node = matched.device_prefix_len, matched.last_device_node
    return int(matched.host_hit_length)


def admit(rig: Rig, request: Request, num_tokens: int) -> Any:
    """Admit a request with slots that are being filled. Return its lock."""
    params = InitLoadBackParams(best_match_node=request.last_node, host_hit_length=num_tokens, req=request)
    loaded = rig.cache.init_load_back(params)
    assert loaded == (num_tokens, request.last_node)
    request.prefix_len += num_tokens
    assert (request.storage_hit_start, request.storage_hit_length) == (0, NUM_STORED * PAGE)
    lock = rig.cache.lock(request.last_node)
    rig.cache.finish_storage_prefetch_admission(request.cache_request_handle, num_tokens, None)
    return lock


def values(rig: Rig, slots: torch.Tensor, layer: int) -> torch.Tensor:
    return rig.pool.k_buffer[layer][slots]


def test_a_request_reads_each_layer_when_it_is_whole(make: MakeRig, decoding: Decoding) -> None:
    rig, tokens = filled(make, decoding)
    request = begin(rig, tokens)
    decoding.open(0)
    rig.await_over(request.cache_request_handle)
    assert rig.states() == [State.CERTAIN]
    num_tokens = match(rig, request)
    assert request.prefix_len + num_tokens == NUM_STORED * PAGE
    lock = admit(rig, request, num_tokens)
    early, k = rig.cache.early_starts, page_values(tokens[: NUM_STORED * PAGE], "k")
    slots = rig.cache.prefix_device_indices(request)
    early.begin_pass([request.rid])
    assert early.consumer_index == 0
    for layer in range(3):
        early.wait_until(layer)
        assert torch.equal(values(rig, slots, layer), k[:, layer])
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(early.wait_until, 3)
        assert not last.done()
        decoding.open(1)
        last.result(WAIT_S)
    assert torch.equal(values(rig, slots, 3), k[:, 3])
    assert early.end_pass([request.rid])
    assert early.consumer_index == -1
    end(rig, request, slots, lock)
    assert rig.holds(tokens, NUM_STORED * PAGE)
    rig.assert_nothing_held()


def end(rig: Rig, request: Request, slots: torch.Tensor, lock: Any) -> None:
    """Insert what the request has, as SGLang does after the pass."""
    key = RadixKey(array("q", request.tokens[: len(slots)])).page_aligned(PAGE)
    rig.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=len(slots)))
    rig.cache.unlock(lock)


@pytest.mark.parametrize("group", [0, 1])
def test_a_layer_that_fails_costs_the_pass(make: MakeRig, decoding: Decoding, group: int) -> None:
    rig, tokens = filled(make, decoding)
    decoding.fails_at = group
    request = begin(rig, tokens)
    decoding.open(*((0,) if group else (0, 1)))
    rig.await_over(request.cache_request_handle)
    num_tokens = match(rig, request)
    assert bool(num_tokens) == (group > 0)  # nobody starts before the first layers are there
    if num_tokens:
        before = request.prefix_len
        lock = admit(rig, request, num_tokens)
        early, slots = rig.cache.early_starts, rig.cache.prefix_device_indices(request)
        early.begin_pass([request.rid])
        decoding.open(1)
        for layer in range(LAYERS):
            early.wait_until(layer)
        assert not early.end_pass([request.rid])
        rig.cache.token_to_kv_pool_allocator.free(slots[before:])
        rig.cache.unlock(lock)
    rig.abort(request.cache_request_handle)
    decoding.open(1)
    rig.assert_nothing_held()


def test_a_layer_that_comes_after_it_was_read_costs_the_pass(
    make: MakeRig, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_MOST_WAIT_S", 0.0)
    rig, tokens = filled(make, decoding)
    request = begin(rig, tokens)
    decoding.open(0)
    rig.await_over(request.cache_request_handle)
    lock = admit(rig, request, match(rig, request))
    starts, slots = rig.cache.early_starts, rig.cache.prefix_device_indices(request)
    (filling,) = starts._started[request.rid]
    starts.begin_pass([request.rid])
    for layer in range(LAYERS):
        starts.wait_until(layer)
    decoding.open(1)
    assert filling.layers.wait(LAYERS - 1, WAIT_S)  # too late
    assert not starts.end_pass([request.rid])
    rig.cache.token_to_kv_pool_allocator.free(slots)
    rig.cache.unlock(lock)
    rig.abort(request.cache_request_handle)
    rig.assert_nothing_held()


def test_a_pass_that_does_not_wait_for_its_layers_is_not_valid(make: MakeRig, decoding: Decoding) -> None:
    """As with an attention backend that reads the pool without asking."""
    rig, tokens = filled(make, decoding)
    request = begin(rig, tokens)
    decoding.open(0)
    rig.await_over(request.cache_request_handle)
    lock = admit(rig, request, match(rig, request))
    starts, slots = rig.cache.early_starts, rig.cache.prefix_device_indices(request)
    starts.begin_pass([request.rid])
    decoding.open(1)
    starts.wait_until(0)
    assert not starts.end_pass([request.rid])
    rig.cache.token_to_kv_pool_allocator.free(slots)
    rig.cache.unlock(lock)
    rig.abort(request.cache_request_handle)
    rig.assert_nothing_held()


def test_nobody_starts_while_others_wait_for_the_same_pages(make: MakeRig, decoding: Decoding) -> None:
    rig, tokens = filled(make, decoding)
    first = begin(rig, tokens)
    rig.settle(lambda: rig.states() == [State.FILLING])
    second = begin(rig, tokens)
    rig.settle(lambda: State.FOLLOWING in rig.states())
    decoding.open(0)
    rig.settle(lambda: rig.states()[0] is State.CERTAIN)
    assert rig.cache.is_parked(first.cache_request_handle)
    assert match(rig, first) == 0
    rig.abort(second.cache_request_handle)
    assert not rig.cache.is_parked(first.cache_request_handle)
    assert match(rig, first) > 0
    decoding.open(1)
    rig.await_over(first.cache_request_handle)
    rig.abort(first.cache_request_handle)
    rig.assert_nothing_held()


def test_a_request_that_has_failed_waits_for_its_pages(make: MakeRig, decoding: Decoding) -> None:
    rig, tokens = filled(make, decoding)
    rig.cache.early_starts.bar("r1")  # the first request
    request = begin(rig, tokens)
    decoding.open(0)
    rig.settle(lambda: rig.states() == [State.FILLING])
    rig.hear_plane()
    rig.cache.step()
    assert rig.cache.is_parked(request.cache_request_handle)
    decoding.open(1)
    rig.await_over(request.cache_request_handle)
    match(rig, request)
    assert request.prefix_len == NUM_STORED * PAGE
    rig.abort(request.cache_request_handle)
    rig.assert_nothing_held()


def test_a_request_that_computes_little_does_not_start_early(make: MakeRig, decoding: Decoding) -> None:
    rig, tokens = filled(make, decoding)
    for _ in range(4):
        for num_tokens in (8, 16, 32, 64, 8, 16):
            rig.cache.prefill_meter.speed.add_batch(num_tokens, 1e-9 * num_tokens)
    request = begin(rig, tokens)
    decoding.open(0)
    rig.settle(lambda: rig.states() == [State.FILLING])
    rig.hear_plane()
    rig.cache.step()
    assert rig.cache.is_parked(request.cache_request_handle)
    decoding.open(1)
    rig.await_over(request.cache_request_handle)
    rig.abort(request.cache_request_handle)
    rig.assert_nothing_held()


def test_layers_are_whole_when_all_heads_of_all_pages_are_there() -> None:
    layers = LayerProgress(3, 2 * HEADS)
    layers.count_cell(range(2), HEADS)
    assert not layers.wait(0, 0.0)
    layers.count_cell(range(1), HEADS)
    assert layers.wait(0, 0.0)
    layers.count_cell(range(2, 3), 2 * HEADS)
    assert not layers.wait(2, 0.0)  # for layer 1 is not whole
    layers.end()
    assert not layers.wait(1, WAIT_S)


@pytest.mark.parametrize(
    ("asked", "is_valid"),
    [([0, 0, 1, 1, 2, 2], True), ([0, 1, 0, 2], True), ([2], False), ([0, 2], False), ([0, 2, 1, 2], False)],
)
def test_a_pass_asks_for_every_layer(asked: list[int], is_valid: bool) -> None:
    """Layers that it did not ask for may have been read before they were whole."""
    starts, layers = early.EarlyStarts(3, bool), LayerProgress(3, 1)
    layers.count_cell(range(3), 1)
    starts.start("r", [Mock(layers=layers)])
    starts.begin_pass(["r"])
    for layer in asked:
        starts.wait_until(layer)
    assert starts.end_pass(["r"]) == is_valid


@pytest.mark.parametrize("is_on", [False, True])
def test_sglang_gets_a_counter_only_for_early_start(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_open_pages", "engine_nvdec", "pool_device", "open_engine_plane", "timeline", "atexit"):
        monkeypatch.setattr(cache, name, Mock())
    monkeypatch.setattr(cache, "require_distinct_images", Mock())
    monkeypatch.setattr(weight_updates, "register_access", Mock())
    extra = json.dumps({"store": "file:///none", "model_id": "m", "device": {"early_start": is_on}})
    monkeypatch.setattr(cache, "get_memory", lambda: Mock(hicache_storage_backend_extra_config=extra))
    made = Mock(spec=cache.KVFetchRadixCache, tree_components=(ComponentType.FULL,), page_size=64)
    made.early_starts = early.EarlyStarts(3, bool)
    made.set_connect = lambda connect: setattr(made, "connect", connect)
    monkeypatch.setattr(cache, "create_unified_radix_cache", lambda ctx, cache_class: made)
    ctx = Mock(tp_rank=0, tp_size=1)
    made.token_to_kv_pool_allocator = ctx.params.token_to_kv_pool_allocator
    cache.build_radix_cache(ctx)
    pool = made.token_to_kv_pool_allocator.get_kvcache()
    pool.register_layer_transfer_counter.assert_called_once_with(made.early_starts if is_on else None)


def test_a_batch_without_a_result_is_taken_apart_once(make: MakeRig) -> None:
    early, requests = make().cache.early_starts, [SimpleNamespace(rid="r")]
    early.discard(7, requests)
    assert early.take_leavers() == requests
    assert early.take_leavers() == []
    assert early.take_discarded(6) == []
    assert early.take_discarded(7) == requests
    assert early.take_discarded(7) == []


class Batch(SimpleNamespace):
    """What the hooks use of SGLang's ``ScheduleBatch``."""

    reqs: list[Any]

    def filter_batch(self, reqs_to_exclude: list[Any]) -> None:
        self.reqs = [req for req in self.reqs if req not in reqs_to_exclude]


def batch(number: int, *requests: Any, decoding: tuple[Any, ...] = ()) -> Batch:
    made = Batch(forward_iter=number, reqs=[*requests, *decoding], decoding_reqs=list(decoding))
    made.forward_mode = ForwardMode.DECODE
    made.launch_ts = 0.0
    return made


@pytest.fixture
def scheduler(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the hooks use of SGLang's scheduler. ``requeued``: the requests that are to be computed again."""
    made = SimpleNamespace(tree_cache=make().cache, chunked_req=None, last_batch=None, requeued=[])
    made.req_to_token_pool = made.token_to_kv_pool_allocator = None
    made.waiting_queue, made.running_batch = [], SimpleNamespace(is_empty=lambda: True)
    made._add_request_to_queue = lambda req, is_retracted: made.requeued.append(req)
    monkeypatch.setattr(schedule_batch, "release_req", lambda **parts: None)
    monkeypatch.setattr(scheduler_hooks, "reserved_tokens", lambda scheduler: 0)
    return made


def discard(scheduler: SimpleNamespace, *, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, list[Any]]:
    """Run a batch whose pages do not come. Return it, and its requests: two prompts, and one that decodes."""
    requests = [SimpleNamespace(rid=name, is_retracted=False) for name in "abc"]
    run = batch(number, *requests[:2], decoding=(requests[2],))
    scheduler.chunked_req = requests[1]
    scheduler.tree_cache.early_starts.start("a", [])
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.tree_cache.early_starts, "end_pass", lambda request_ids: False)
        assert scheduler_hooks.run_batch(lambda *args: "result", scheduler, run) == "result"
    return run, requests


def test_all_prompts_of_a_batch_are_computed_again(scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (a, b, c) = discard(scheduler, number=3, monkeypatch=monkeypatch)
    assert [each.is_retracted for each in (a, b, c)] == [True, True, False]
    assert scheduler.chunked_req is None
    scheduler_hooks.measure_batch(None, scheduler, run, "result")
    assert scheduler.requeued == [a, b]
    assert not scheduler.tree_cache.early_starts.may_start("a")
    scheduler.last_batch = run
    scheduler_hooks.step_cache(None, scheduler)
    assert run.reqs == [c]


def test_with_overlap_the_batch_before_is_processed_first(
    scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (a, b, c) = discard(scheduler, number=3, monkeypatch=monkeypatch)
    processed = batch(3, *run.reqs)  # a copy, as SGLang makes one
    scheduler_hooks.measure_batch(None, scheduler, batch(2, b), "result")
    assert scheduler.requeued == []
    scheduler.last_batch = run
    scheduler_hooks.step_cache(None, scheduler)
    assert run.reqs == [c]
    scheduler_hooks.measure_batch(None, scheduler, processed, "result")
    assert scheduler.requeued == [a, b]
    scheduler_hooks.measure_batch(None, scheduler, processed, "result")
    assert scheduler.requeued == [a, b]
