"""The waiting queue while requests are parked, as the hook that forms batches keeps it for the linker."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvfetch.plugin.device.waiting_queue import form_batch, reserved_tokens


@dataclass(eq=False)
class Request:
    cache_request_handle: int

    @property
    def rid(self) -> str:
        return str(self.cache_request_handle)


class Linker:
    """Parks what a test says."""

    is_kvfetch = True

    def __init__(self) -> None:
        self.prefixes = self
        self.parked: set[int] = set()
        self.changed: list[int] = []
        self.arrived: list[int] = []
        self.gone: list[int] = []
        self.retained: set[str] = set()
        self.returning: list[Request] = []
        self.is_beside: list[bool] = []

    def step(self, tree: Any, wanted_tokens: Callable[[], int], *, is_beside: bool) -> list[Request]:
        self.is_beside.append(is_beside)
        returning, self.returning = self.returning, []
        return returning

    def hold_back(self, free_tokens: Callable[[], float]) -> None:
        pass

    def retain(self, rids: Collection[str]) -> None:
        self.retained = set(rids)

    def is_parked(self, handle: int) -> bool:
        return handle in self.parked

    def arrive(self, request: Request, tree: Any, span: None, *, is_idle: bool) -> None:
        self.arrived.append(request.cache_request_handle)

    def leave(self, rid: str) -> None:
        self.gone.append(int(rid))

    def take_changed(self) -> list[int]:
        changed, self.changed = self.changed, []
        return changed

    def park(self, handle: int, parked: bool = True) -> None:
        (self.parked.add if parked else self.parked.discard)(handle)
        self.changed.append(handle)


@dataclass
class Scheduler:
    """The part of SGLang's scheduler that forms batches: it goes through its list and makes a new one."""

    linker: Linker = field(default_factory=Linker)
    tree_cache: Any = None
    waiting_queue: list[Request] = field(default_factory=list)
    running_batch: Any = None
    last_batch: Any = None
    chunked_req: Any = None
    enable_overlap: bool = True
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree_cache = self.tree_cache or SimpleNamespace(linker=SimpleNamespace(cache_linker=self.linker))

    def arrive(self, *handles: int) -> None:
        for handle in handles:
            self.waiting_queue.append(Request(handle))

    def form(self, *admit: int, preempt: tuple[int, ...] = ()) -> None:
        self.seen = [request.cache_request_handle for request in self.waiting_queue]
        if admit:
            self.waiting_queue = [r for r in self.waiting_queue if r.cache_request_handle not in admit]
        self.arrive(*preempt)

    def step(self, *admit: int, preempt: tuple[int, ...] = ()) -> list[int]:
        form_batch(Scheduler.form, self, *admit, preempt=preempt)
        return self.seen

    @property
    def waiting(self) -> list[int]:
        return [request.cache_request_handle for request in self.waiting_queue]


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler()
    scheduler.arrive(1, 2, 3, 4)
    return scheduler


def test_requests_that_return_while_a_batch_is_formed(scheduler: Scheduler) -> None:
    scheduler.linker.park(9)
    assert scheduler.step(1, preempt=(8, 9)) == [1, 2, 3, 4]
    assert scheduler.waiting == [2, 3, 4, 8, 9]
    assert scheduler.step() == [2, 3, 4, 8]
    scheduler.step(preempt=(10,))
    assert scheduler.step() == [2, 3, 4, 8, 10]


def test_the_queue_is_complete_after_forming_a_batch_raises(scheduler: Scheduler) -> None:
    def fail(scheduler: Scheduler) -> None:
        raise RuntimeError

    scheduler.linker.park(2)
    with pytest.raises(RuntimeError):
        form_batch(fail, scheduler)
    assert scheduler.waiting == [1, 2, 3, 4]


def test_the_linker_is_told_who_arrives_again_and_who_leaves(scheduler: Scheduler) -> None:
    scheduler.step(1)
    assert scheduler.linker.retained == {"1", "2", "3", "4"}
    scheduler.waiting_queue.pop(0)
    assert scheduler.linker.gone == [1, 2]
    scheduler.linker.arrived.clear()
    scheduler.linker.returning = [scheduler.waiting_queue[0]]
    scheduler.step()
    assert scheduler.linker.arrived == [3]


def test_the_linker_is_told_when_the_device_computes_beside_a_step(scheduler: Scheduler) -> None:
    for has_batch, scheduler.enable_overlap in [(False, True), (True, True), (True, False)]:
        scheduler.last_batch = SimpleNamespace(reqs=[]) if has_batch else None
        scheduler.step()
    assert scheduler.linker.is_beside == [False, True, False]


def test_other_caches_are_left_alone() -> None:
    scheduler = Scheduler(tree_cache=SimpleNamespace())
    scheduler.arrive(1)
    assert scheduler.step() == [1]
    assert type(scheduler.waiting_queue) is list


def test_random_histories_against_one_plain_list() -> None:
    rng = random.Random(0)
    scheduler = Scheduler()
    plain: list[int] = []
    parked: set[int] = set()
    for handle in range(2000):
        if rng.random() < 0.5:
            scheduler.linker.park(handle)
            parked.add(handle)
        scheduler.arrive(handle)
        plain.append(handle)
        for other in rng.sample(plain, min(len(plain), rng.randrange(4))):
            scheduler.linker.park(other, other not in parked)
            parked ^= {other}
        if rng.random() < 0.4:
            victim = plain.pop(rng.randrange(len(plain)))
            scheduler.waiting_queue.pop(scheduler.waiting.index(victim))
        ready = [h for h in plain if h not in parked]
        admitted = rng.sample(ready, min(len(ready), rng.randrange(3)))
        assert scheduler.step(*admitted) == ready
        plain = [h for h in plain if h not in admitted]
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
