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
from sgl_kvfetch.plugin import auto_profile
from sgl_kvfetch.plugin.auto_profile import AutoProfile

DIGEST = "0123456789abcdef00000000ffffffff"


class Plane:
    """A data plane that finds a profile when it is told to."""

    def __init__(self) -> None:
        self.found_profile = ""
        self.is_closing = False
        self.paused: list[bool] = []
        self.switched_with: list[Callable[[], object]] = []

    def pause_calibration(self, *, is_paused: bool) -> None:
        self.paused.append(is_paused)

    def switch(self, make: Callable[[], object]) -> None:
        self.switched_with.append(make)


@pytest.fixture(autouse=True)
def _no_profile_is_left() -> Iterator[None]:
    yield
    auto_profile.end()


class Engine:
    """Two ranks, which step together."""

    def __init__(self) -> None:
        self.planes = [Plane(), Plane()]
        self.ranks = [
            AutoProfile(cast("Any", plane), rank, 2, cast("Any", lambda digest: digest), pauses=False)
            for rank, plane in enumerate(self.planes)
        ]
        self._values: list[torch.Tensor] = [torch.empty(0)] * 2
        self._barrier = threading.Barrier(2, timeout=WAIT_S)

    def step(self, *, is_idle: bool = False) -> None:
        """Until the ranks agree."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._step, range(2), [is_idle] * 2))

    def _step(self, rank: int, is_idle: bool) -> None:
        def all_reduce(values: torch.Tensor, op: Any) -> None:
            assert op == torch.distributed.ReduceOp.MAX
            self._values[rank] = values.clone()
            self._barrier.wait()
            most = torch.stack(self._values).amax(0)
            self._barrier.wait()
            values.copy_(most)

        tree = SimpleNamespace(_all_reduce_attn_groups=all_reduce)
        scheduler = SimpleNamespace(tree_cache=tree, last_batch=None if is_idle else "batch")
        for _ in range(4 if is_idle else auto_profile._AGREE_EVERY):
            self.ranks[rank].step(scheduler)

    @property
    def switched_with(self) -> list[list[object]]:
        return [[make() for make in plane.switched_with] for plane in self.planes]


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_ranks_switch_in_one_step_to_what_the_first_has_found(is_idle: bool) -> None:
    """Idle ones within a few steps: with --sleep-on-idle, each takes a second."""
    engine = Engine()
    engine.step(is_idle=is_idle)
    assert engine.switched_with == [[], []]
    engine.planes[0].found_profile = DIGEST
    engine.step(is_idle=is_idle)
    assert engine.switched_with == [[DIGEST], [DIGEST]]


def test_one_rank_switches_once() -> None:
    plane = Plane()
    one = AutoProfile(cast("Any", plane), 0, 1, cast("Any", lambda digest: digest), pauses=False)
    auto_profile.begin(one)
    one.step(None)
    assert auto_profile.current() is one
    plane.found_profile = DIGEST
    one.step(None)
    assert [make() for make in plane.switched_with] == [DIGEST]
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
    plane.found_profile = DIGEST
    one.step(None)
    assert auto_profile.current() is None
    assert f"the store has profile {DIGEST}; device mode on a GPU stores with it once the backend is" in caplog.text


def test_a_backend_that_is_detached_takes_no_part() -> None:
    plane = Plane()
    auto_profile.begin(AutoProfile(cast("Any", plane), 0, 1, None, pauses=False))
    plane.is_closing = True
    assert auto_profile.current() is None
