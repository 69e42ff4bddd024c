"""Policies that choose the variant to fetch next. They are pure: equal situations get equal answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.plane.adapt.estimate import Transfer, robust
from sgl_kvfetch.plane.adapt.pipeline import Pipeline, PoolState


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs to a choice, just before the next chunk is requested.

    Variants are indices into ``profile.variants``, and ``profile`` is corrected by observed decode times.
    ``sizes_bytes`` and ``work`` (number of integers relative to the profile's chunk) describe the next chunk; later
    chunks are assumed to be like it. ``remaining`` counts all chunks not yet requested, the next one included, also
    those of this process's other fetches, which share link and decoders. ``transfers``: this link's recent transfers,
    oldest first; running ones count with the bytes received so far.
    """

    profile: DecodeProfile
    pool: PoolState
    transfers: tuple[Transfer, ...]
    remaining: int
    previous: int | None  # the variant requested last
    sizes_bytes: tuple[int, ...]
    available: tuple[int, ...]  # the stored variants of the next chunk
    work: float = 1.0

    def __post_init__(self) -> None:
        assert self.remaining >= 1, self.remaining
        assert len(self.sizes_bytes) == len(self.profile.variants)
        assert self.available, "expected at least one stored variant"


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, situation: Situation) -> int:
        """Return one of ``situation.available``."""


_TIE = 1e-9


class Outlook(Protocol):
    def paths(self, num_chunks: int) -> Sequence[Sequence[float]]:
        """Return equally likely scenarios: for each, the bits per second during each of the next chunks."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Our policy: choose the variant with which the fetch ends soonest, on average over the link's scenarios.

    A plan is one variant for the next chunk and one for all later chunks. Each plan is simulated with a model of link
    and pool that starts from the decoders' current work. A variant's score is that of its best plan. Every chunk is
    decided anew, so a fetch may use more variants than one plan has. Of variants that end at the same time, the
    smallest is chosen: it leaves more bandwidth to others.

    ``outlook`` estimates the link's bandwidth from its transfers. ``horizon``: chunks to look ahead, at most 64, after
    which the fetch is assumed to end. The computing time grows with it.
    """

    name: str = "ours"
    outlook: Callable[[Sequence[Transfer]], Outlook] = robust
    horizon: int = 32

    def choose(self, situation: Situation) -> int:
        if len(situation.available) == 1:
            return situation.available[0]
        paths = self.outlook(situation.transfers).paths(min(situation.remaining, self.horizon))
        now = Pipeline.from_state(situation.profile, situation.pool, work=situation.work)
        # Do this once for all plans: while other chunks wait, the exact arrival time of the next does not matter.
        now.run_until_waiting(len(situation.pool.sessions))
        scores = {variant: self._finish_s(now, variant, paths, situation) for variant in situation.available}
        best = min(scores.values())
        soonest = [v for v, score in scores.items() if score <= best * (1 + _TIE)]
        return min(soonest, key=lambda v: (situation.sizes_bytes[v], v))

    def _finish_s(self, now: Pipeline, variant: int, paths: Sequence[Sequence[float]], situation: Situation) -> float:
        """Return the end of the fetch with ``variant`` for the next chunk and the best one for the rest, summed over
        ``paths``. Each path holds the link's bits per second, by chunk."""
        sizes = situation.sizes_bytes
        sums = dict.fromkeys(situation.available, 0.0)
        for first_bps, *rest_bps in paths:
            after, link_free_s = now.copy(), sizes[variant] * 8 / first_bps
            after.deliver_at(link_free_s, variant)
            for following in sums:
                sums[following] += _finish_s(after, following, sizes[following], rest_bps, link_free_s)
        return min(sums.values())


def _finish_s(
    pipeline: Pipeline, variant: int, size_bytes: int, bandwidth_bps: Sequence[float], link_free_s: float
) -> float:
    """Return when the last chunk is decoded if the chunks are sent one after the other from ``link_free_s`` on."""
    rollout = pipeline.copy()
    for bps in bandwidth_bps:
        link_free_s += size_bytes * 8 / bps
        rollout.deliver_at(link_free_s, variant)
    return rollout.drained_s()
