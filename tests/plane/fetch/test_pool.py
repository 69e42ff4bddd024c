"""The board, the tracker, and the pool of threads that goes by them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.plane.fetch.pool import (
    DecodePool,
    DecodeProfile,
    PoolState,
    PoolTracker,
    SessionQueue,
    VariantProfile,
)

PROFILE = DecodeProfile(
    device="d",
    source="s",
    variants=(
        VariantProfile(name="small", size_bytes=10, decode_s=(1.0, 2.0), switch_s=0.5),
        VariantProfile(name="large", size_bytes=20, decode_s=(0.5, 1.0)),
    ),
)


def num_busy(state: PoolState) -> int:
    return sum(each.cells_left > 0 or each.switch_left_s > 0 for each in state.sessions)


def test_the_first_idle_session_gets_the_chunk() -> None:
    board: SessionQueue[str] = SessionQueue(2)
    assert board.submit(0, "a") == (0, 0, True, "a")  # new sessions are set up for nothing
    assert board.submit(1, "b") == (1, 1, True, "b")
    assert board.submit(1, "c") is None
    assert board.submit(0, "d") is None
    assert board.finish(1) == (1, 1, False, "c")
    assert board.finish(1) == (1, 0, True, "d")
    assert board.finish(0) is None
    assert board.submit(0, "e") == (0, 0, False, "e")


def test_a_copy_of_a_board_is_its_own() -> None:
    board: SessionQueue[str] = SessionQueue(1)
    board.submit(0, "a")
    copy = board.copy()
    copy.submit(0, "b")
    copy.finish(0)
    assert board.waiting == []
    assert board.busy == [True]


def test_the_tracker_follows_the_profile() -> None:
    tracker = PoolTracker(PROFILE, 2)
    tracker.started(0.0, 0, 0, True, 1.0)
    halfway = tracker.state(1.0, [1])  # 0.5 s of switching, 0.5 s of 1 s
    assert halfway.sessions[0].cells_left == pytest.approx(0.5)
    assert halfway.sessions[1].configured is None
    assert halfway.waiting == (1,)
    assert num_busy(halfway) == 1
    tracker.started(1.0, 1, 1, False, 2.0)  # from now on each is half as fast; a cell twice as long
    both = tracker.state(1.5, [])
    assert both.sessions[0].cells_left == pytest.approx(0.25)
    assert both.sessions[1].cells_left == pytest.approx(1.5)


def test_the_tracker_learns_that_decoders_are_slower() -> None:
    tracker = PoolTracker(PROFILE, 1)
    tracker.started(0.0, 0, 1, False, 1.0)
    assert tracker.corrected_profile is PROFILE
    tracker.ended(1.0, 0)  # 0.5 s was expected
    assert tracker.corrected_profile.decode_time_s(1, 1) == pytest.approx(1.0)


def test_the_tracker_learns_from_a_chunk_that_is_late() -> None:
    tracker = PoolTracker(PROFILE, 1)
    tracker.started(0.0, 0, 1, False, 1.0)
    assert tracker.state(5.0, []).sessions[0].cells_left > 0
    assert tracker.corrected_profile.decode_time_s(1, 1) > 2.0


def test_what_was_not_decoded_teaches_nothing() -> None:
    tracker = PoolTracker(PROFILE, 1)
    tracker.started(0.0, 0, 1, False, 1.0)
    tracker.ended(9.0, 0, decoded=False)
    assert tracker.corrected_profile is PROFILE
    assert num_busy(tracker.state(9.0, [])) == 0


@pytest.fixture
def pool() -> Iterator[DecodePool[str]]:
    with_sessions = DecodePool(["session 0", "session 1"], PROFILE)
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


def test_chunks_go_to_idle_sessions_in_order(pool: DecodePool[str]) -> None:
    gates = [Gate() for _ in range(4)]
    futures = [pool.submit(gate, 0) for gate in gates]
    assert gates[0].began.wait(WAIT_S)
    assert gates[1].began.wait(WAIT_S)
    assert num_busy(pool.state()) == 2
    assert pool.state().waiting == (0, 0)
    assert not gates[2].began.is_set()
    gates[1].may_end.set()
    assert futures[1].result(WAIT_S) == "session 1"
    assert gates[2].began.wait(WAIT_S)
    assert not gates[3].began.is_set()
    for gate in gates:
        gate.may_end.set()
    assert [future.result(WAIT_S) for future in futures[:3]] == ["session 0", "session 1", "session 1"]
    futures[3].result(WAIT_S)
    assert num_busy(pool.state()) == 0


def test_an_error_reaches_who_waits_and_the_session_goes_on(pool: DecodePool[str]) -> None:
    def fail(_: str) -> None:
        raise ValueError("corrupt")

    for _ in range(3):
        with pytest.raises(ValueError, match="corrupt"):
            pool.submit(fail, 0).result(WAIT_S)
    assert pool.submit(str, 0).result(WAIT_S) == "session 0"


def test_a_chunk_that_nobody_wants_any_more_is_not_decoded(pool: DecodePool[str]) -> None:
    gates = [Gate() for _ in range(3)]
    futures = [pool.submit(gate, 0) for gate in gates]
    assert futures[2].cancel()
    for gate in gates[:2]:
        gate.may_end.set()
    assert pool.submit(str, 1).result(WAIT_S)
    assert not gates[2].began.is_set()


def test_close_cancels_what_waits() -> None:
    pool = DecodePool(["only"], PROFILE)
    gate = Gate()
    running = pool.submit(gate, 0)
    waiting = pool.submit(Gate(), 0)
    assert gate.began.wait(WAIT_S)
    threading.Timer(0.05, gate.may_end.set).start()
    pool.close()
    assert running.result(0) == "only"
    assert waiting.cancelled()


def test_a_pool_that_no_policy_asks_needs_no_profile() -> None:
    pool = DecodePool(["session 0", "session 1"])
    gates = [Gate() for _ in range(3)]
    futures = [pool.submit(gate) for gate in gates]
    assert gates[0].began.wait(WAIT_S)
    assert gates[1].began.wait(WAIT_S)
    assert not gates[2].began.is_set()
    for gate in gates:
        gate.may_end.set()
    assert {future.result(WAIT_S) for future in futures[:2]} == {"session 0", "session 1"}
    futures[2].result(WAIT_S)
    with pytest.raises(AssertionError, match="no profile"):
        pool.state()
    pool.close()


def test_what_is_not_in_the_profile_takes_a_session_and_teaches_nothing(pool: DecodePool[str]) -> None:
    gates = [Gate() for _ in range(4)]
    futures = [pool.submit(gate, variant) for gate, variant in zip(gates, (None, 0, None, 1), strict=True)]
    assert gates[0].began.wait(WAIT_S)
    assert gates[1].began.wait(WAIT_S)
    assert not gates[2].began.is_set()
    assert (num_busy(pool.state()), pool.state().waiting) == (1, (1,))
    for gate in gates:
        gate.may_end.set()
    for future in futures:
        future.result(WAIT_S)
    corrected = pool.profile
    for _ in range(3):
        pool.submit(str).result(WAIT_S)
    assert pool.profile == corrected


def test_close_need_not_wait() -> None:
    pool = DecodePool(["only"])
    gate = Gate()
    running, waiting = pool.submit(gate), pool.submit(Gate())
    assert gate.began.wait(WAIT_S)
    pool.close(wait=False)
    assert waiting.cancelled()
    assert not running.done()
    gate.may_end.set()
    assert running.result(WAIT_S) == "only"


def test_the_pool_corrects_its_profile() -> None:
    now_s = 0.0

    def decode(_: None) -> None:
        nonlocal now_s
        now_s += 1.0  # 0.5 s was expected

    pool: DecodePool[None] = DecodePool([None], PROFILE, clock=lambda: now_s)
    pool.submit(decode, 1).result(WAIT_S)
    assert pool.profile.decode_time_s(1, 1) == pytest.approx(1.0)
    pool.close()


@pytest.mark.parametrize("profile", [PROFILE, None], ids=["with a profile", "without"])
def test_sessions_decode_side_by_side(profile: DecodeProfile | None) -> None:
    now_s = 0.0

    def decode(_: None) -> None:
        nonlocal now_s
        now_s += 0.5

    def fail(_: None) -> None:
        nonlocal now_s
        now_s += 9.0
        raise ValueError("corrupt")

    with closing(DecodePool[None]([None, None], profile, clock=lambda: now_s)) as pool:
        assert pool.bytes_per_s is None
        for size_bytes in (1000, 3000):
            pool.submit(decode, size_bytes=size_bytes).result(WAIT_S)
        assert pool.submit(fail, size_bytes=1000).exception(WAIT_S) is not None
        assert pool.bytes_per_s == pytest.approx(2 * 4000)


def test_the_last_sessions_yield_to_other_threads() -> None:
    with closing(DecodePool(["usual", "yielding"], num_yielding=1)) as pool:
        both = threading.Barrier(2)

        def nice(session: str) -> tuple[str, int]:
            both.wait(WAIT_S)
            return session, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        here = os.getpriority(os.PRIO_PROCESS, 0)
        found = dict(future.result(WAIT_S) for future in [pool.submit(nice), pool.submit(nice)])
        assert found == {"usual": here, "yielding": here + 5}
