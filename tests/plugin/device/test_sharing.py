from __future__ import annotations

import pytest

from sgl_kvfetch.plugin.device.fetch_state import State
from sgl_kvfetch.plugin.device.known import Sharing
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_followers_look_again_after_any_landing() -> None:
    sharing: Sharing[str] = Sharing()
    assert not sharing.follow("follower", "a")
    sharing.lead("leader", ["a", "b", "c"])
    assert sharing.follow("follower", "b")
    assert sharing.leader_of("follower") == "leader"
    assert sharing.has_followers("leader")
    assert not sharing.take_resumed(8)
    sharing.ended("leader", ["a"])
    assert sharing.take_resumed(8) == ["follower"]
    assert sharing.leader_of("follower") is None
    assert not sharing.has_followers("leader")
    assert not sharing.take_resumed(8)
    assert not sharing.follow("follower", "a")
    assert sharing.follow("follower", "b")  # which is still to come


def test_a_page_keeps_its_new_leader() -> None:
    sharing: Sharing[str] = Sharing()
    sharing.lead("first", ["a", "b"])
    sharing.lead("second", ["b"])
    sharing.ended("first", ["a", "b"])
    assert not sharing.follow("follower", "a")
    assert sharing.follow("follower", "b")
    assert sharing.leader_of("follower") == "second"


def test_followers_that_have_ended_do_not_count() -> None:
    sharing: Sharing[int] = Sharing()
    sharing.lead(0, ["a"])
    for follower in range(1, 7):
        assert sharing.follow(follower, "a")
    sharing.stop_following(1)
    sharing.ended(0, ["a"])
    sharing.stop_following(3)
    assert sharing.take_resumed(3) == [2, 4, 5]
    assert sharing.take_resumed(3) == [6]


def test_the_last_follower_that_leaves_leaves_no_followers() -> None:
    sharing: Sharing[str] = Sharing()
    sharing.lead("leader", ["a"])
    sharing.follow("follower", "a")
    sharing.stop_following("follower")
    assert not sharing.has_followers("leader")


def test_clearing_leaves_no_leaders() -> None:
    sharing: Sharing[str] = Sharing()
    sharing.lead("leader", ["a"])
    sharing.follow("follower", "a")
    sharing.ended("leader", [])
    sharing.clear()
    assert not sharing.take_resumed(8)
    assert not sharing.follow("follower", "a")


def test_pages_are_fetched_once_for_requests_that_share_them(make: MakeRig) -> None:
    rig = make(device={"pool_share": 0.5})  # 32 pages: so many may be on the link together
    tokens, other = prompt(0, 12), prompt(1, 4)
    rig.stored(tokens)
    rig.stored(other)
    rig.store.reads.is_open = False
    first = rig.arrive(tokens[:32])
    rig.settle(lambda: rig.store.reads.num_waiting > 0)
    second, third = rig.arrive(tokens[:32]), rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.FILLING, State.FOLLOWING, State.FOLLOWING])
    fourth = rig.arrive(other)  # which none of the others keeps waiting
    rig.settle(lambda: rig.states() == [State.FILLING, State.FOLLOWING, State.FOLLOWING, State.FILLING])
    assert not any(rig.cache.check_prefetch_progress(h) for h in (first, second, third))
    rig.store.reads.is_open = True
    locks = []
    for handle, asked, expected in ((first, tokens[:32], 32), (second, tokens[:32], 0), (third, tokens, 16)):
        rig.await_over(handle)
        cached, loaded, lock = rig.admit(handle, asked)
        assert (cached, loaded) == (len(asked), expected)
        locks.append(lock)
    assert rig.holds(tokens, 48)
    rig.await_over(fourth)
    rig.abort(fourth)
    assert len(rig.store.data_reads) == len(set(rig.store.data_reads))
    for lock in locks:
        rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_a_follower_gets_what_its_aborted_leader_fetches(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    leader = rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.FILLING])
    follower = rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.FILLING, State.FOLLOWING])
    rig.abort(leader)
    rig.store.reads.is_open = True
    rig.await_over(follower)
    cached, _, lock = rig.admit(follower, tokens)
    assert cached == 32
    assert rig.holds(tokens, 32)
    rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_a_follower_goes_on_as_soon_as_its_own_pages_have_landed(make: MakeRig) -> None:
    rig = make(device={"round_tokens": 16})
    tokens = prompt(0, 16)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    leader = rig.arrive(tokens)
    rig.settle(lambda: len(set(rig.store.data_reads)) >= 4)
    starts = sorted({start for _, start in rig.store.data_reads})
    follower = rig.arrive(tokens[:8])
    rig.settle(lambda: rig.states() == [State.AWAITING_BYTES, State.FOLLOWING])
    rig.store.reads.lets_through = lambda name, start: start in starts[:2]
    rig.await_over(follower)
    assert not rig.cache.check_prefetch_progress(leader)
    cached, _, lock = rig.admit(follower, tokens[:8])
    assert cached == 8
    rig.cache.unlock(lock)
    rig.store.reads.is_open = True
    rig.await_over(leader)
    assert rig.admit(leader, tokens)[0] == 64
