"""What policies choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sgl_kvfetch.plane.fetch.link import Transfer
from sgl_kvfetch.plane.fetch.plan import LookAhead, Situation
from sgl_kvfetch.plane.fetch.pool import DecodeProfile, Pipeline, PoolState, SessionState, VariantProfile
from tests.plane.fetch.published import PUBLISHED

H20 = PUBLISHED["H20"]
P240, P480, P640, P1080 = range(4)
IDLE = PoolState(tuple(SessionState(P1080) for _ in range(7)))


def at(gbps: float, count: int = 1) -> tuple[Transfer, ...]:
    return tuple(Transfer(int(gbps * 1e9 / 8), float(i), i + 1.0) for i in range(count))


def situation(gbps: float | None, profile: DecodeProfile = H20, count: int = 1) -> Situation:
    return Situation(
        profile=profile,
        pool=IDLE,
        transfers=at(gbps, count) if gbps else (),
        remaining=8,
        sizes_bytes=tuple(v.size_bytes for v in profile.variants),
        available=tuple(range(len(profile.variants))),
    )


def busy(count: int, variant: int) -> PoolState:
    sessions = [SessionState(variant, 0.0, 0.9)] * count + [SessionState(P1080)] * (7 - count)
    return PoolState(tuple(sessions))


def test_only_what_is_stored_is_chosen() -> None:
    for gbps in (0.5, 5.0, 50.0):
        for available in ((1,), (0, 3), (1, 2)):
            assert LookAhead().choose(replace(situation(gbps), available=available)) in available


def test_ours_saves_bytes_on_a_slow_link_and_decoding_on_a_fast_one() -> None:
    ours = LookAhead()
    assert ours.choose(situation(2.0, count=4)) == P240
    assert ours.choose(situation(200.0, count=4)) == P1080


def test_ours_sees_what_the_decoders_have_before_them() -> None:
    """Behind a long queue the link is free: what decodes fast is right although it takes longer to come."""
    ours = LookAhead()
    fetch = replace(situation(15.0, count=6), remaining=6)
    sessions = tuple(SessionState(P1080, 0.0, 0.9) for _ in range(7))
    assert ours.choose(fetch) == P240
    assert ours.choose(replace(fetch, pool=PoolState(sessions, waiting=(P1080,) * 20))) == P1080


def test_ours_chooses_the_codec_too() -> None:
    """A fast codec decodes at once, but its cells are large: right on a fast link only."""
    hevc = VariantProfile(name="hevc 240p", size_bytes=180_000_000, decode_s=(0.2, 0.4))
    fast = VariantProfile(name="zstd", size_bytes=900_000_000, decode_s=(0.02, 0.02))
    profile = DecodeProfile(device="d", source="s", variants=(hevc, fast))
    pool = PoolState((SessionState(), SessionState()))
    slow_link = replace(situation(5.0, profile, 4), pool=pool)
    fast_link = replace(situation(1000.0, profile, 4), pool=pool)
    assert LookAhead().choose(slow_link) == 0
    assert LookAhead().choose(fast_link) == 1
    # In between both are best: the decoders have time for some cells.
    mixed_s, variants = fetch_s(profile, LookAhead().choose)
    assert set(variants) == {0, 1}
    always: tuple[Callable[[Situation], int], ...] = (lambda _: 0, lambda _: 1)
    assert mixed_s < min(fetch_s(profile, variant)[0] for variant in always)


def fetch_s(profile: DecodeProfile, choose: Callable[[Situation], int]) -> tuple[float, list[int]]:
    """Return the seconds of a fetch of 8 cells over a link of 100 Gbps into two decoders, and the variants chosen."""
    pipeline, now_s = Pipeline(profile, 2), 0.0
    transfers: list[Transfer] = []
    chosen: list[int] = []
    for remaining in range(8, 0, -1):
        pipeline.run_until(now_s)
        seen = replace(situation(None, profile), pool=pipeline.state(), transfers=tuple(transfers), remaining=remaining)
        chosen.append(choose(seen))
        size_bytes = profile.variants[chosen[-1]].size_bytes
        transfers.append(Transfer(size_bytes, now_s, now_s + size_bytes * 8 / 100e9))
        now_s = transfers[-1].end_s
        pipeline.deliver_at(now_s, chosen[-1])
    return pipeline.drained_s(), chosen


def test_choosing_is_pure() -> None:
    one = situation(9.0, count=3)
    before = repr(one)
    assert len({LookAhead().choose(one) for _ in range(3)}) == 1
    assert repr(one) == before


def test_a_horizon_bounds_the_work() -> None:
    """A fetch of a million cells is decided as soon as one of some dozens."""
    endless = replace(situation(20.0, count=4), remaining=1_000_000)
    assert LookAhead(horizon=8).choose(endless) == LookAhead(horizon=8).choose(replace(endless, remaining=8))


@pytest.mark.parametrize("gbps", [1.0, 8.0, 30.0])
def test_chunks_that_wait_are_looked_past_once(gbps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is skipped what is the same for all plans changes no answer."""
    profile = PUBLISHED["L20"]
    sizes = tuple(v.size_bytes for v in profile.variants)
    transfers = tuple(Transfer(int(gbps * 1e9 / 8 / 10), i / 10, (i + 1) / 10) for i in range(5))
    for num_waiting in (0, 2, 3, 4, 9, 40):
        pool = PoolState(tuple(SessionState(0, 0.0, 0.3 + 0.2 * i) for i in range(3)), (0, 3) * (num_waiting // 2))
        situation = Situation(profile, pool, transfers, 6, sizes, tuple(range(len(sizes))))
        skipping = LookAhead().choose(situation)
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "run_until_waiting", lambda *_: None)
            assert LookAhead().choose(situation) == skipping


def test_a_pipeline_runs_until_few_wait() -> None:
    profile = PUBLISHED["L20"]
    pool = PoolState(tuple(SessionState(0, 0.0, 1.0) for _ in range(3)), (0,) * 10)
    ahead, behind = (Pipeline.from_state(profile, pool) for _ in range(2))
    ahead.run_until_waiting(3)
    assert len(ahead.board.waiting) == 3
    assert ahead.now_s > 0
    ahead.deliver_at(ahead.now_s / 2, 0)  # came in the meantime
    behind.deliver_at(ahead.now_s / 2, 0)
    assert ahead.drained_s() == pytest.approx(behind.drained_s())
