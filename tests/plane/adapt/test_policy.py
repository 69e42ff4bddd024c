"""What policies choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.adaptive.policies import Fixed, MinimalBubble
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.simulator import Scenario, simulate
from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile, VariantProfile
from sgl_kvfetch.plane.adapt.estimate import Transfer
from sgl_kvfetch.plane.adapt.pipeline import Pipeline, PoolState, SessionState
from sgl_kvfetch.plane.adapt.policy import LookAhead, Situation

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
        previous=P1080,
        sizes_bytes=tuple(v.size_bytes for v in profile.variants),
        available=tuple(range(len(profile.variants))),
    )


def busy(count: int, variant: int) -> PoolState:
    sessions = [SessionState(variant, 0.0, 0.9)] * count + [SessionState(P1080)] * (7 - count)
    return PoolState(tuple(sessions))


def test_algorithm_1_by_hand() -> None:
    """6 Gbps, an idle pool: 0.24, 0.273, 0.313, 0.341 s to transmit; with the penalties 0.29, 0.26, 0.23, 0.19 to
    decode. 480p differs least, by 0.013 s."""
    assert MinimalBubble().choose(situation(6.0)) == P480


def test_algorithm_1_pays_no_penalty_for_staying() -> None:
    """6.7 Gbps, 240p: 0.215 s to transmit, 0.21 to decode, but 0.29 after another; then 480p: 0.245 and 0.26."""
    assert MinimalBubble().choose(replace(situation(6.7), previous=P240)) == P240
    assert MinimalBubble().choose(situation(6.7)) == P480


def test_algorithm_1_goes_by_the_last_chunk_alone() -> None:
    slow_then_fast = replace(situation(1.0), transfers=(*at(1.0, 8), Transfer(5 * 10**9, 8.0, 9.0)))
    assert MinimalBubble().choose(situation(1.0)) == P240
    assert MinimalBubble().choose(slow_then_fast) == P1080


def test_algorithm_1_looks_at_the_load() -> None:
    """8 Gbps. Alone: 640p 0.235 s to transmit and 0.23 to decode, 1080p 0.256 and 0.19. With two more: 640p 0.32 to
    decode, 1080p 0.26. More than the pool has sessions are never decoded at once."""
    assert MinimalBubble().choose(situation(8.0)) == P640
    assert MinimalBubble().choose(replace(situation(8.0), pool=busy(2, P1080))) == P1080
    one_session = PoolState((SessionState(P1080, 0.0, 0.9),), waiting=(P1080,) * 5)
    assert MinimalBubble().choose(replace(situation(8.0), pool=one_session)) == P640


def test_algorithm_1_before_the_first_chunk() -> None:
    assert MinimalBubble().choose(situation(None)) == P1080
    assert MinimalBubble().choose(replace(situation(None), available=(0, 1))) == P480


def test_fixed() -> None:
    assert Fixed(P480, "480p").choose(situation(6.0)) == P480
    assert Fixed(P480, "480p").choose(replace(situation(6.0), available=(P240, P640))) == P640
    assert Fixed(P1080, "1080p").choose(replace(situation(6.0), available=(P240, P640))) == P640


@pytest.mark.parametrize("policy", [MinimalBubble(), LookAhead()])
def test_only_what_is_stored_is_chosen(policy: MinimalBubble | LookAhead) -> None:
    for gbps in (0.5, 5.0, 50.0):
        for available in ((1,), (0, 3), (1, 2)):
            assert policy.choose(replace(situation(gbps), available=available)) in available


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
    """A fast codec decodes at once, but its chunks are large: right on a fast link only."""
    hevc = VariantProfile(name="hevc 240p", size_bytes=180_000_000, decode_s=(0.2, 0.4))
    fast = VariantProfile(name="zstd", size_bytes=900_000_000, decode_s=(0.02, 0.02))
    profile = DecodeProfile(device="d", source="s", variants=(hevc, fast))
    pool = PoolState((SessionState(), SessionState()))
    slow_link = replace(situation(5.0, profile, 4), pool=pool)
    fast_link = replace(situation(1000.0, profile, 4), pool=pool)
    assert LookAhead().choose(slow_link) == 0
    assert LookAhead().choose(fast_link) == 1
    # In between both are best: the decoders have time for some chunks.
    scenario = Scenario("mixed", profile, (100e9,), ((0.0, 8),), 2)
    mixed = simulate(scenario, LookAhead())
    assert set(mixed.variants) == {0, 1}
    assert mixed.end_s < min(simulate(scenario, Fixed(v, str(v))).end_s for v in (0, 1))


def test_choosing_is_pure() -> None:
    for policy in (MinimalBubble(), LookAhead()):
        one = situation(9.0, count=3)
        before = repr(one)
        assert len({policy.choose(one) for _ in range(3)}) == 1
        assert repr(one) == before


def test_a_horizon_bounds_the_work() -> None:
    """A fetch of a million chunks is decided as soon as one of some dozens."""
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
        situation = Situation(profile, pool, transfers, 6, 0, sizes, tuple(range(len(sizes))))
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
