"""The model of a pool."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.plane.fetch.pool import DecodeProfile, Pipeline, PoolTracker, SessionStart
from tests.plane.fetch.published import PUBLISHED

H20 = PUBLISHED["H20"]
P240, P1080 = 0, 3

arrivals = st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 3)), min_size=1, max_size=12)


class ObservedPipeline(Pipeline):
    """Counts the decoded cells, and tells a tracker of each begin and end."""

    def __init__(self, profile: DecodeProfile, num_sessions: int, tracker: PoolTracker) -> None:
        super().__init__(profile, num_sessions)
        self.num_decoded = 0
        self._tracker = tracker

    def begin(self, start: SessionStart[None] | None) -> None:
        super().begin(start)
        if start is not None:
            self._tracker.started(self.now_s, start.session, start.variant, start.switches, self.work)

    def end(self, session: int) -> None:
        self.num_decoded += 1
        self._tracker.ended(self.now_s, session)
        super().end(session)


def test_a_lone_chunk_takes_what_the_table_says() -> None:
    pipeline = Pipeline(H20, 7)
    pipeline.deliver_at(1.0, P1080)
    assert pipeline.drained_s() == pytest.approx(1.19)


def test_a_switch_takes_its_penalty_once() -> None:
    pipeline = Pipeline(H20, 1)
    pipeline.deliver(P240)
    pipeline.deliver(P240)
    assert pipeline.drained_s() == pytest.approx(0.08 + 0.21 + 0.21)


def test_chunks_share_the_decoders() -> None:
    """Two from the start to the end at the pace of two; a third that comes halfway slows both."""
    pipeline = Pipeline(H20, 7)
    pipeline.deliver(P1080)
    pipeline.deliver(P1080)
    assert pipeline.copy().drained_s() == pytest.approx(0.19)
    pipeline.deliver_at(0.095, P1080)
    # Half a cell is left of each, at the pace of three; half of the third is left then, which is alone.
    assert pipeline.drained_s() == pytest.approx(0.095 + 0.13 + 0.5 * 0.19)


def test_a_full_pool_lets_chunks_wait() -> None:
    pipeline = Pipeline(H20, 2)
    for _ in range(4):
        pipeline.deliver(P1080)
    assert pipeline.state().waiting == (P1080, P1080)
    assert pipeline.drained_s() == pytest.approx(2 * 0.19)


def test_a_smaller_chunk_takes_less() -> None:
    pipeline = Pipeline(H20, 1, work=0.5)
    pipeline.deliver(P1080)
    assert pipeline.drained_s() == pytest.approx(0.095)


@settings(deadline=None)
@given(arrivals, st.floats(0, 3))
def test_it_goes_on_from_its_state(cells: list[tuple[float, int]], pause_s: float) -> None:
    """What a policy is told of a pool is enough to know when it will be done."""
    pipeline = Pipeline(H20, 3)
    for gap_s, variant in cells:
        pipeline.deliver_at(pipeline.now_s + gap_s, variant)
    pipeline.run_until(pipeline.now_s + pause_s)
    begun_s = pipeline.now_s
    again = Pipeline.from_state(H20, pipeline.state())
    left_s = again.drained_s()
    ended_s = pipeline.drained_s()
    assert left_s == pytest.approx(ended_s - begun_s, abs=1e-9)


@settings(deadline=None)
@given(arrivals)
def test_the_tracker_sees_what_the_model_does(cells: list[tuple[float, int]]) -> None:
    """Told of nothing but begins and ends, it knows the pool's state, and finds the profile right."""
    tracker = PoolTracker(H20, 3)
    pipeline = ObservedPipeline(H20, 3, tracker)
    for gap_s, variant in cells:
        pipeline.deliver_at(pipeline.now_s + gap_s, variant)
    model = pipeline.state()
    tracked = tracker.state(pipeline.now_s, [variant for variant, _ in pipeline.board.waiting])
    assert tracked.waiting == model.waiting
    for seen, true in zip(tracked.sessions, model.sessions, strict=True):
        assert seen.configured == true.configured
        assert seen.switch_left_s == pytest.approx(true.switch_left_s, abs=1e-9)
        # What is all but done counts as a little, so that it is not taken for idle.
        assert seen.cells_left == pytest.approx(true.cells_left, abs=0.021)
    pipeline.drained_s()
    corrected = tracker.corrected_profile
    for before, after in zip(H20.variants, corrected.variants, strict=True):
        assert after.decode_s == pytest.approx(before.decode_s, rel=1e-6)


@settings(deadline=None)
@given(arrivals)
def test_no_chunk_is_lost(cells: list[tuple[float, int]]) -> None:
    pipeline = ObservedPipeline(H20, 2, PoolTracker(H20, 2))
    for gap_s, variant in cells:
        pipeline.deliver_at(pipeline.now_s + gap_s, variant)
    assert math.isfinite(pipeline.drained_s())
    assert pipeline.num_decoded == len(cells)


def test_profiles_with_one_variant_do() -> None:
    only = DecodeProfile(device="d", source="s", variants=(H20.variants[0],))
    pipeline = Pipeline(only, 1)
    pipeline.deliver(0)
    assert pipeline.drained_s() == pytest.approx(0.29)
