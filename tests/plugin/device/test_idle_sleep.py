"""Tests of the scheduler's loop while requests are parked, with sockets like SGLang's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sgl_kvfetch.plugin.device import scheduler_hooks
from sgl_kvfetch.plugin.device.scheduler_hooks import form_batch, sleep_when_idle
from tests.plugin.device.test_queue import Cache, Request

LONG_MS = 20_000  # none of the tests takes that long


@dataclass
class Scheduler:
    """The part of SGLang's scheduler that its loop uses when there is no batch to run."""

    ipc_channels: Any
    tree_cache: Any = field(default_factory=Cache)
    waiting_queue: list[Request] = field(default_factory=list)
    schedule_low_priority_values_first: bool = False

    def __post_init__(self) -> None:
        self.recv_from_tokenizer = self.ipc_channels.recv_from_tokenizer

    def idle(self) -> float:
        """Run the loop once. Return the seconds that it took."""
        form_batch(lambda scheduler: None, self)
        started_s = time.monotonic()
        sleep_when_idle(None, self)
        return time.monotonic() - started_s


@pytest.fixture
def channels() -> Iterator[SimpleNamespace]:
    context = zmq.Context()
    sockets = [context.socket(zmq.PULL), context.socket(zmq.DEALER)]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    yield SimpleNamespace(recv_from_tokenizer=sockets[0], recv_from_rpc=sockets[1], context=context, ports=ports)
    context.destroy(linger=0)


@pytest.fixture
def scheduler(channels: SimpleNamespace) -> Scheduler:
    """Return a scheduler with one parked request."""
    scheduler = Scheduler(channels)
    scheduler.tree_cache.is_pending = True
    scheduler.tree_cache.park(1)
    scheduler.waiting_queue.append(Request(1))
    return scheduler


def test_the_scheduler_sleeps_while_all_requests_are_parked(scheduler: Scheduler) -> None:
    num_turns = 200
    started_s, started_cpu_s = time.monotonic(), time.thread_time()
    for _ in range(num_turns):
        scheduler.idle()
    took_s, cpu_s = time.monotonic() - started_s, time.thread_time() - started_cpu_s
    assert took_s >= 0.9 * num_turns * scheduler_hooks._IDLE_SLEEP_MS / 1000
    assert cpu_s < 0.5 * took_s


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER], ids=["tokenizer", "rpc"])
def test_a_request_that_arrives_ends_the_sleep(
    scheduler: Scheduler, channels: SimpleNamespace, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_hooks, "_IDLE_SLEEP_MS", LONG_MS)
    with channels.context.socket(kind) as sender:
        sender.connect(f"tcp://127.0.0.1:{channels.ports[kind == zmq.DEALER]}")
        timer = threading.Timer(0.1, lambda: sender.send(b"a request"))
        timer.start()
        assert 0.05 < scheduler.idle() < LONG_MS / 1000 / 2
        timer.join()
        assert scheduler.idle() < LONG_MS / 1000 / 2  # and it does not sleep again before it has received the request


def unpark(scheduler: Scheduler) -> None:
    scheduler.tree_cache.park(1, False)


def add_ready(scheduler: Scheduler) -> None:
    scheduler.waiting_queue.append(Request(2))


def end_all(scheduler: Scheduler) -> None:
    scheduler.tree_cache.is_pending = False


def have_another_cache(scheduler: Scheduler) -> None:
    scheduler.tree_cache = SimpleNamespace(has_pending_cache_operations=lambda: True)


def be_another_rank(scheduler: Scheduler) -> None:
    scheduler.ipc_channels = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
    scheduler.recv_from_tokenizer = None


def have_a_rust_server(scheduler: Scheduler) -> None:
    scheduler.recv_from_tokenizer = object()


@pytest.mark.parametrize(
    "change", [unpark, add_ready, end_all, have_another_cache, be_another_rank, have_a_rust_server]
)
def test_the_scheduler_does_not_sleep_otherwise(
    scheduler: Scheduler, change: Callable[[Scheduler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_hooks, "_IDLE_SLEEP_MS", LONG_MS)
    change(scheduler)
    assert scheduler.idle() < LONG_MS / 1000 / 2


def test_the_scheduler_sleeps_without_requests_while_work_is_pending(scheduler: Scheduler) -> None:
    """Pending work: copies, or fetches whose requests are gone."""
    scheduler.waiting_queue = []
    assert scheduler.idle() >= 0.9 * scheduler_hooks._IDLE_SLEEP_MS / 1000
