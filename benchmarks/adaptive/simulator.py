"""Simulates fetches over one link into one decode pool, with discrete events, without clock or randomness.

The link carries one chunk at a time, in order; concurrent fetches take turns. The first idle session decodes a chunk
once it has arrived whole (a real pipeline may start earlier). Restoring takes no time. Policies see what they would see
of a real pool, through the same code. They do not see future bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.plane.adapt.estimate import Transfer
from sgl_kvfetch.plane.adapt.pipeline import Pipeline, SessionStart
from sgl_kvfetch.plane.adapt.policy import Policy, Situation
from sgl_kvfetch.plane.adapt.pool import PoolTracker

_MOST_TRANSFERS = 16  # that policies see


@dataclass(frozen=True, slots=True)
class Scenario:
    """``bandwidth_bps[i]`` is the bandwidth during the i-th chunk, counted over all fetches; the trace repeats.
    ``fetches``: each one's arrival time and number of chunks."""

    name: str
    profile: DecodeProfile
    bandwidth_bps: tuple[float, ...]
    fetches: tuple[tuple[float, int], ...]
    num_sessions: int
    believed: DecodeProfile | None = None  # the profile that policies see; None is the real one

    def __post_init__(self) -> None:
        assert self.bandwidth_bps, self.name
        assert min(self.bandwidth_bps) > 0, self.name
        assert self.fetches, self.name
        assert all(arrival_s >= 0 and num_chunks >= 1 for arrival_s, num_chunks in self.fetches), self.name

    @property
    def num_chunks(self) -> int:
        return sum(num_chunks for _, num_chunks in self.fetches)


class DecodeRecord(NamedTuple):
    item: int
    session: int
    variant: int
    start_s: float
    end_s: float


class TransmitRecord(NamedTuple):
    item: int
    fetch: int
    variant: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """``end_s``: when the last of all chunks is restored. ``fetch_s``: for each fetch, the time from its arrival until
    its last chunk is restored."""

    end_s: float
    fetch_s: tuple[float, ...]
    transmitted: tuple[TransmitRecord, ...]
    decoded: tuple[DecodeRecord, ...]

    @property
    def mean_fetch_s(self) -> float:
        return sum(self.fetch_s) / len(self.fetch_s)

    @property
    def variants(self) -> tuple[int, ...]:
        return tuple(t.variant for t in self.transmitted)


class ObservedPipeline(Pipeline):
    """Keeps a record of each decoded chunk, and lets a tracker follow. Chunks are numbered as they arrive."""

    def __init__(self, profile: DecodeProfile, num_sessions: int, tracker: PoolTracker) -> None:
        super().__init__(profile, num_sessions)
        self.records: list[DecodeRecord] = []
        self._tracker = tracker
        self._num_started = 0
        self._running: dict[int, tuple[int, int, float]] = {}  # by session: item, variant, start

    def begin(self, start: SessionStart[None] | None) -> None:
        super().begin(start)
        if start is not None:
            self._tracker.started(self.now_s, start.session, start.variant, start.switches, self.work)
            self._running[start.session] = self._num_started, start.variant, self.now_s
            self._num_started += 1  # sessions take chunks in the order of arrival

    def end(self, session: int) -> None:
        item, variant, start_s = self._running.pop(session)
        self.records.append(DecodeRecord(item, session, variant, start_s, self.now_s))
        self._tracker.ended(self.now_s, session)
        super().end(session)


class _Turns:
    """Decides which fetch sends the next chunk."""

    def __init__(self, fetches: Sequence[tuple[float, int]]) -> None:
        self._fetches = fetches
        self._left = [num_chunks for _, num_chunks in fetches]
        self._last = -1

    def next(self, link_free_s: float) -> tuple[int, float] | None:
        """Return a fetch and the time when its chunk starts, or None if all chunks are transmitted."""
        open_fetches = [i for i, left in enumerate(self._left) if left]
        if not open_fetches:
            return None
        begin_s = max(link_free_s, min(self._fetches[i][0] for i in open_fetches))
        come = [i for i in open_fetches if self._fetches[i][0] <= begin_s]
        fetch = next((i for i in come if i > self._last), come[0])
        self._left[fetch] -= 1
        self._last = fetch
        return fetch, begin_s

    def remaining(self, now_s: float) -> int:
        """Count the remaining chunks of the fetches that have arrived."""
        return sum(left for left, (arrival_s, _) in zip(self._left, self._fetches, strict=True) if arrival_s <= now_s)


def simulate(scenario: Scenario, policy: Policy) -> Outcome:
    """Run a scenario to its end. Deterministic."""
    tracker = PoolTracker(scenario.believed or scenario.profile, scenario.num_sessions)
    pipeline = ObservedPipeline(scenario.profile, scenario.num_sessions, tracker)
    turns = _Turns(scenario.fetches)
    sizes_bytes = tuple(v.size_bytes for v in scenario.profile.variants)
    transmitted: list[TransmitRecord] = []
    transfers: list[Transfer] = []
    previous: int | None = None
    link_free_s = 0.0
    while (turn := turns.next(link_free_s)) is not None:
        fetch, begin_s = turn
        pipeline.run_until(begin_s)
        situation = Situation(
            profile=tracker.corrected_profile,
            pool=tracker.state(begin_s, [variant for variant, _ in pipeline.board.waiting]),
            transfers=tuple(transfers[-_MOST_TRANSFERS:]),
            remaining=1 + turns.remaining(begin_s),
            previous=previous,
            sizes_bytes=sizes_bytes,
            available=tuple(range(len(sizes_bytes))),
        )
        previous = policy.choose(situation)
        item = len(transmitted)
        bandwidth_bps = scenario.bandwidth_bps[item % len(scenario.bandwidth_bps)]
        link_free_s = begin_s + sizes_bytes[previous] * 8 / bandwidth_bps
        transmitted.append(TransmitRecord(item, fetch, previous, begin_s, link_free_s))
        transfers.append(Transfer(sizes_bytes[previous], begin_s, link_free_s))
        pipeline.deliver_at(link_free_s, previous)
    pipeline.drained_s()
    decoded = tuple(pipeline.records)
    ends_s = [0.0] * len(scenario.fetches)
    for record in decoded:
        fetch = transmitted[record.item].fetch
        ends_s[fetch] = max(ends_s[fetch], record.end_s)
    fetch_s = tuple(end_s - arrival_s for end_s, (arrival_s, _) in zip(ends_s, scenario.fetches, strict=True))
    return Outcome(max(ends_s), fetch_s, tuple(transmitted), decoded)
