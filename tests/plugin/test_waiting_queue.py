"""The waiting queue while requests are parked, as the hook that forms batches keeps it for the linker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from sgl_kvfetch.plugin.device.waiting_queue import form_batch, reserved_tokens


@dataclass(eq=False)
class Request:
    cache_request_handle: int

    @property
    def rid(self) -> str:
        return str(self.cache_request_handle)


class Scheduler:
    """The part of SGLang's scheduler that forms batches: it goes through its list and makes a new one. Its linker parks
    what a test says."""

    last_batch: Any = None
    running_batch = chunked_req = None
    enable_overlap = True

    def __init__(self, *handles: int) -> None:
        self.parked, self.changed = set[int](), list[int]()
        self.linker = Mock(is_kvfetch=True, step=Mock(return_value=[]))
        self.linker.prefixes.is_parked = self.parked.__contains__
        self.linker.prefixes.take_changed = lambda: [self.changed.pop() for _ in self.changed[:]]
        self.tree_cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=self.linker))
        self.waiting_queue = [Request(handle) for handle in handles]
        self.seen: list[int] = []

    def toggle(self, handle: int) -> None:
        self.parked ^= {handle}
        self.changed.append(handle)

    def form(
        self, *admit: int, preempt: Sequence[int] = (), refuse: Sequence[int] = (), compiled: Sequence[int] = ()
    ) -> None:
        for handle in compiled:  # their grammars
            self.waiting_queue.append(Request(handle))
        self.seen = self.waiting
        for handle in refuse:  # for others that come, where the queue is full
            self.waiting_queue.pop(self.waiting.index(handle))
        if admit:
            self.waiting_queue = [r for r in self.waiting_queue if r.cache_request_handle not in admit]
        for handle in preempt:
            self.waiting_queue.append(Request(handle))

    def step(self, *admit: int, **changes: Sequence[int]) -> list[int]:
        form_batch(Scheduler.form, self, *admit, **changes)
        return self.seen

    @property
    def waiting(self) -> list[int]:
        return [request.cache_request_handle for request in self.waiting_queue]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(1, 2, 3, 4)


def test_the_queue_is_complete_after_forming_a_batch_raises(scheduler: Scheduler) -> None:
    scheduler.toggle(2)
    with pytest.raises(ZeroDivisionError):
        form_batch(lambda _: 1 // 0, scheduler)
    assert scheduler.waiting == [1, 2, 3, 4]


def test_the_linker_is_told_who_arrives_again_and_who_leaves(scheduler: Scheduler) -> None:
    scheduler.step(1)
    scheduler.linker.prefixes.retain.assert_called_once_with({"1", "2", "3", "4"})
    scheduler.waiting_queue.pop(0)
    assert scheduler.linker.prefixes.leave.call_args_list == [call("1"), call("2")]
    scheduler.linker.arrive.reset_mock()
    scheduler.linker.step.return_value = [scheduler.waiting_queue[0]]
    scheduler.step()
    assert [told.args[0].rid for told in scheduler.linker.arrive.call_args_list] == ["3"]


def test_the_linker_is_told_when_the_device_computes_beside_a_step(scheduler: Scheduler) -> None:
    for has_batch, scheduler.enable_overlap in [(False, True), (True, True), (True, False)]:
        scheduler.last_batch = SimpleNamespace(reqs=[]) if has_batch else None
        scheduler.step()
    assert [told.kwargs["is_beside"] for told in scheduler.linker.step.call_args_list] == [False, True, False]


def test_requests_whose_grammar_is_compiled_arrive_before_they_are_admitted() -> None:
    scheduler = Scheduler()
    scheduler.step()
    scheduler.parked.add(1)
    assert scheduler.step(2, compiled=[1, 2, 3]) == [2, 3]
    assert scheduler.waiting == [1, 3]
    assert scheduler.step(3) == [3]
    assert scheduler.step() == []
    assert scheduler.linker.prefixes.leave.call_args_list == [call("2"), call("3")]


def test_other_caches_are_left_alone(scheduler: Scheduler) -> None:
    scheduler.tree_cache = SimpleNamespace()
    assert scheduler.step() == [1, 2, 3, 4]
    assert type(scheduler.waiting_queue) is list


def test_random_histories_against_one_plain_list() -> None:
    """Some requests return while a batch is formed, and others are refused for them; the grammars of some are compiled
    until then."""
    rng, scheduler = random.Random(0), Scheduler()
    plain: list[int] = []
    for handle in range(2000):
        if rng.random() < 0.5:
            scheduler.toggle(handle)
        returns, is_compiled = rng.choice([(False, False), (True, False), (False, True)])
        if not returns and not is_compiled:
            scheduler.waiting_queue.append(Request(handle))
            plain.append(handle)
        for other in rng.sample(plain, min(len(plain), rng.randrange(4))):
            scheduler.toggle(other)
        if plain and rng.random() < 0.4:
            victim = plain.pop(rng.randrange(len(plain)))
            scheduler.waiting_queue.pop(scheduler.waiting.index(victim))
        compiled = [handle] * is_compiled
        plain += compiled
        ready = [each for each in plain if each not in scheduler.parked]
        gone = rng.sample(ready, min(len(ready), rng.randrange(3)))
        refused, admitted = (gone[:1], gone[1:]) if returns or is_compiled else ([], gone)
        assert scheduler.step(*admitted, preempt=[handle] * returns, refuse=refused, compiled=compiled) == ready
        plain = [each for each in plain if each not in gone] + [handle] * returns
        assert scheduler.waiting == plain


def test_slots_reserved_for_running_requests() -> None:
    def request(max_new_tokens: int, num_output: int, ignore_eos: bool = False) -> SimpleNamespace:
        params = SimpleNamespace(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        return SimpleNamespace(sampling_params=params, output_ids=[0] * num_output)

    running, fixed, prefilled = request(100, 20), request(50, 10, ignore_eos=True), request(10, 10)
    scheduler = SimpleNamespace(
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
        tree_cache=SimpleNamespace(page_size=16),
        running_batch=SimpleNamespace(reqs=[running, fixed]),
        last_batch=SimpleNamespace(reqs=[fixed, prefilled]),
        chunked_req=SimpleNamespace(origin_input_ids=[0] * 500, output_ids=[], prefix_len=200),
    )
    assert reserved_tokens(scheduler) == 40 + 40 + 0 + 3 * 16 + 300
