"""The pool of decode threads, and what it learns of their speed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.plane.fetch.pool import DecodePool


@pytest.fixture
def pool() -> Iterator[DecodePool[str]]:
    with_sessions = DecodePool(["session 0", "session 1"])
    yield with_sessions
    with_sessions.close()


class Gate:
    """A job that tells when it began and ends when it may."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, session: str) -> str:
        self.began.set()
        assert self.may_end.wait(WAIT_S)
        return session


def test_cells_go_to_idle_sessions_in_order_unless_they_are_cancelled(pool: DecodePool[str]) -> None:
    gates = [Gate() for _ in range(4)]
    futures = [pool.submit(gate) for gate in gates]
    assert gates[0].began.wait(WAIT_S)
    assert gates[1].began.wait(WAIT_S)
    assert not gates[2].began.is_set()
    assert futures[2].cancel()  # nobody wants it any more
    gates[1].may_end.set()
    assert gates[3].began.wait(WAIT_S)
    for gate in gates:
        gate.may_end.set()
    assert [futures[i].result(WAIT_S) for i in (0, 1, 3)] == ["session 0", "session 1", "session 1"]
    assert not gates[2].began.is_set()


@pytest.mark.parametrize("waits", [True, False])
def test_close_cancels_what_waits(waits: bool) -> None:
    pool = DecodePool(["only"])
    gate = Gate()
    running, waiting = pool.submit(gate), pool.submit(Gate())
    assert gate.began.wait(WAIT_S)
    if waits:
        threading.Timer(0.05, gate.may_end.set).start()
    pool.close(wait=waits)
    assert waiting.cancelled()
    assert running.done() == waits
    gate.may_end.set()
    assert running.result(WAIT_S) == "only"


class Clock:
    """Time passes while cells are decoded."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def lasting(self, seconds: float) -> Callable[[object], None]:
        def decode(_: object) -> None:
            self.now_s += seconds

        return decode


def test_a_coding_is_expected_to_take_what_its_last_whole_cells_took() -> None:
    def fail(_: None) -> None:
        clock.now_s += 9.0
        raise ValueError("corrupt")

    def decode(coding: str, seconds: float, num_integers: int = 1000, size_bytes: int = 100) -> None:
        job = clock.lasting(seconds)
        pool.submit(job, coding, num_integers=num_integers, size_bytes=size_bytes).result(WAIT_S)

    clock = Clock()
    with closing(DecodePool[None]([None, None], clock=clock)) as pool:
        assert (pool.bytes_per_s, pool.seconds("ans", 1000)) == (None, 0.0)
        decode("ans", 0.5)
        decode("ans", 0.5, 3000, 300)
        for _ in range(2):  # no session is lost
            with pytest.raises(ValueError, match="corrupt"):
                pool.submit(fail, "ans", num_integers=1000, size_bytes=1000).result(WAIT_S)
        pool.submit(clock.lasting(1.0)).result(WAIT_S)  # of nothing
        assert pool.bytes_per_s == pytest.approx(2 * 400)
        assert pool.seconds("ans", 1000) == pytest.approx(0.25)
        decode("hevc 240p", 1.0)
        assert pool.seconds("hevc 240p", 1000) == pytest.approx(1.0)
        for _ in range(16):
            decode("ans", 0.125)
        assert pool.seconds("ans", 1000) == pytest.approx(0.125)
        assert pool.queued_s == 0


def test_what_waits_and_what_runs_is_queued() -> None:
    clock = Clock()
    with closing(DecodePool(["only"], clock=clock)) as pool:
        pool.submit(clock.lasting(1.0), "ans", num_integers=1000).result(WAIT_S)
        gate = Gate()
        running = pool.submit(gate, "ans", num_integers=500)
        waiting = pool.submit(clock.lasting(1.0), "ans", num_integers=2000)
        assert pool.queued_s == pytest.approx(2.5)
        gate.may_end.set()
        running.result(WAIT_S)
        waiting.result(WAIT_S)
        assert pool.queued_s == pytest.approx(0)


def test_the_last_sessions_yield_to_other_threads() -> None:
    with closing(DecodePool(["usual", "yielding"], num_yielding=1)) as pool:
        both = threading.Barrier(2)

        def nice(session: str) -> tuple[str, int]:
            both.wait(WAIT_S)
            return session, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        here = os.getpriority(os.PRIO_PROCESS, 0)
        found = dict(future.result(WAIT_S) for future in [pool.submit(nice), pool.submit(nice)])
        assert found == {"usual": here, "yielding": here + 5}
