"""All ranks of an engine go over to one profile in the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.waiting import WAIT_S
from sgl_kvfetch.plane.protocol import ProfileTaken
from sgl_kvfetch.plugin import auto_profile
from sgl_kvfetch.plugin.auto_profile import AutoProfile

DIGEST = "0123456789abcdef00000000ffffffff"


class Plane:
    """A data plane that does at once, or when it is told to, what others take their time for."""

    def __init__(self) -> None:
        self.taken_profile: ProfileTaken | None = None
        self.is_prepared = self.is_closing = False
        self.asked: list[str] = []
        self.paused: list[bool] = []
        self.prepared_with: list[Callable[[], object]] = []
        self.num_switches = 0

    def take(self, digest: str) -> None:
        self.taken_profile = ProfileTaken(digest, f"/copies/{digest}", "about")

    def take_profile(self, digest: str) -> None:
        self.asked.append(digest)

    def prepare(self, make: Callable[[], object]) -> None:
        self.prepared_with.append(make)

    def pause_calibration(self, *, is_paused: bool) -> None:
        self.paused.append(is_paused)

    def switch(self) -> None:
        self.num_switches += 1


@pytest.fixture(autouse=True)
def _no_profile_is_left() -> Iterator[None]:
    yield
    auto_profile.end()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each rank that takes no more part."""
    entries: list[None] = []
    monkeypatch.setattr(auto_profile, "end", lambda: entries.append(None))
    return entries


class Engine:
    """Two ranks, which step together."""

    def __init__(self, *, can_switch: bool = True) -> None:
        self.planes = [Plane(), Plane()]
        self._values: list[torch.Tensor] = [torch.empty(0)] * 2
        self._barrier = threading.Barrier(2, timeout=WAIT_S)
        follow = cast("Any", lambda path: path) if can_switch else None
        self.ranks = [
            AutoProfile(cast("Any", plane), rank, 2, follow, pauses=False) for rank, plane in enumerate(self.planes)
        ]

    def step(self, *, is_idle: bool = False) -> None:
        """Until the ranks agree."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._step, range(2), [is_idle] * 2))

    def _step(self, rank: int, is_idle: bool) -> None:
        def all_reduce(values: torch.Tensor, op: Any) -> None:
            assert op == torch.distributed.ReduceOp.MIN
            self._values[rank] = values.clone()
            self._barrier.wait()
            least = torch.stack(self._values).amin(0)
            self._barrier.wait()
            values.copy_(least)

        tree = SimpleNamespace(_all_reduce_attn_groups=all_reduce)
        scheduler = SimpleNamespace(tree_cache=tree, last_batch=None if is_idle else "batch")
        for _ in range(4 if is_idle else auto_profile._AGREE_EVERY):
            self.ranks[rank].step(scheduler)


def test_ranks_switch_to_what_the_first_has_found_and_not_before_all_can() -> None:
    engine = Engine()
    first, second = engine.planes
    engine.step()
    assert second.asked == []
    first.take(DIGEST)
    engine.step()
    assert (first.asked, second.asked) == ([], [DIGEST])
    assert len(first.prepared_with) == 1
    second.take(DIGEST)
    first.is_prepared = True
    for _ in range(2):
        engine.step()
    assert [len(plane.prepared_with) for plane in engine.planes] == [1, 1]
    assert [plane.prepared_with[0]() for plane in engine.planes] == [f"/copies/{DIGEST}"] * 2
    assert (first.num_switches, second.num_switches) == (0, 0)
    first.take("f" * 32)  # a newer one does not change the choice
    engine.step()
    second.is_prepared = True
    first.take(DIGEST)
    engine.step()
    assert (first.num_switches, second.num_switches) == (1, 1)


def test_a_rank_whose_data_plane_was_restarted_switches_with_the_others() -> None:
    engine = Engine()
    engine.planes[0].take(DIGEST)
    engine.step()
    engine.planes[1].take(DIGEST)
    engine.step()
    for plane in engine.planes:
        plane.is_prepared = True
    engine.planes[1].taken_profile = None  # the next one has not taken it yet
    engine.step()
    assert [plane.num_switches for plane in engine.planes] == [1, 1]


def test_where_ranks_cannot_switch_all_take_part_until_all_have_the_profile(ended: list[None]) -> None:
    engine = Engine(can_switch=False)
    engine.planes[0].take(DIGEST)
    for _ in range(3):
        engine.step()
    assert not ended  # the second rank would wait for the first one
    engine.planes[1].take(DIGEST)
    engine.step()
    assert len(ended) == 2


def test_idle_ranks_agree_within_a_few_steps() -> None:
    """With --sleep-on-idle, each takes a second."""
    engine = Engine()
    engine.planes[0].take(DIGEST)
    engine.step(is_idle=True)
    assert engine.planes[1].asked == [DIGEST]


def test_one_rank_switches_when_it_can() -> None:
    plane = Plane()
    one = AutoProfile(cast("Any", plane), 0, 1, cast("Any", lambda path: path), pauses=False)
    auto_profile.begin(one)
    one.step(None)
    plane.take(DIGEST)
    for _ in range(2):
        one.step(None)
    assert (len(plane.prepared_with), plane.num_switches) == (1, 0)
    plane.is_prepared = True
    one.step(None)
    assert plane.num_switches == 1
    assert auto_profile.current() is None


def scheduler(*, is_idle: bool) -> Any:
    return SimpleNamespace(is_fully_idle=lambda for_health_check: is_idle)


def test_calibrating_pauses_while_an_engine_on_the_cpu_has_requests() -> None:
    plane = Plane()
    one = AutoProfile(cast("Any", plane), 0, 1, cast("Any", None), pauses=True)
    for is_idle in (True, False, False, True, True):
        one.step(scheduler(is_idle=is_idle))
    assert plane.paused == [True, False]


def test_where_it_cannot_switch_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plane = Plane()
    one = AutoProfile(cast("Any", plane), 0, 1, None, pauses=False)
    auto_profile.begin(one)
    assert auto_profile.current() is one
    plane.take(DIGEST)
    for _ in range(2):
        one.step(None)
    assert auto_profile.current() is None
    assert "about; device mode on a GPU stores with it once the backend is attached again" in caplog.text


def test_a_backend_that_is_detached_takes_no_part() -> None:
    plane = Plane()
    auto_profile.begin(AutoProfile(cast("Any", plane), 0, 1, None, pauses=False))
    plane.is_closing = True
    assert auto_profile.current() is None
