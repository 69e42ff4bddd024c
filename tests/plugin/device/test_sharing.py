from __future__ import annotations

from sgl_kvfetch.plugin.device.flow import Flow
from sgl_kvfetch.plugin.device.sharing import Sharing


def flow(number: int) -> Flow:
    return Flow(handle=number, key=None, start=0, arrival=number, arrived_s=0.0)


def test_followers_look_again_when_anything_has_landed() -> None:
    sharing, leader, follower = Sharing(), flow(0), flow(1)
    assert not sharing.follow(follower, "a")
    sharing.lead(leader, ["a", "b", "c"])
    assert sharing.follow(follower, "b")
    assert follower.leader is leader
    assert not sharing.take_resumed(8)
    sharing.ended(leader, ["a"])
    assert sharing.take_resumed(8) == [follower]
    assert follower.leader is None
    assert not sharing.take_resumed(8)
    assert not sharing.follow(follower, "a")
    assert sharing.follow(follower, "b")  # which is still to come


def test_a_page_that_another_one_has_begun_to_fetch_stays_that_ones() -> None:
    sharing, first, second = Sharing(), flow(0), flow(1)
    sharing.lead(first, ["a", "b"])
    sharing.lead(second, ["b"])
    sharing.ended(first, ["a", "b"])
    follower = flow(2)
    assert not sharing.follow(follower, "a")
    assert sharing.follow(follower, "b")
    assert follower.leader is second


def test_followers_that_are_gone_do_not_count() -> None:
    sharing, leader = Sharing(), flow(0)
    followers = [flow(number) for number in range(1, 6)]
    sharing.lead(leader, ["a"])
    for follower in followers:
        assert sharing.follow(follower, "a")
    followers[0].cancelled = True
    sharing.ended(leader, ["a"])
    followers[2].cancelled = True
    assert sharing.take_resumed(3) == [followers[1], followers[3]]
    assert sharing.take_resumed(3) == [followers[4]]


def test_whose_pages_are_wanted() -> None:
    sharing, leader, follower = Sharing(), flow(0), flow(1)
    sharing.lead(leader, ["a"])
    sharing.follow(follower, "a")
    leader.cancelled = True
    assert leader.is_wanted
    follower.cancelled = True
    assert not leader.is_wanted


def test_nothing_is_left_when_all_is_dropped() -> None:
    sharing, leader, follower = Sharing(), flow(0), flow(1)
    sharing.lead(leader, ["a"])
    sharing.follow(follower, "a")
    sharing.ended(leader, [])
    sharing.clear()
    assert not sharing.take_resumed(8)
    assert not sharing.follow(follower, "a")
