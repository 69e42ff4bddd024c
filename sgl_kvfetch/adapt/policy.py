"""Which variant to fetch next. Policies are pure: the same situation gets the same answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_kvfetch.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.adapt.estimate import Transfer, robust
from sgl_kvfetch.adapt.pipeline import Pipeline, PoolState


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when the next chunk is about to be asked for.

    Variants are indices into ``profile.variants``; ``profile`` is corrected by what was observed. ``sizes_bytes`` and
    ``work`` (integers against those of the profile's chunk) are of the next chunk; those after it are taken to be like
    it. ``remaining`` counts it, and the chunks that other fetches of this process have yet to ask for: they share link
    and decoders. ``transfers``: recent ones of this link, the oldest first, the running ones
    with what they have brought so far.
    """

    profile: DecodeProfile
    pool: PoolState
    transfers: tuple[Transfer, ...]
    remaining: int
    previous: int | None  # the variant that was asked for last
    sizes_bytes: tuple[int, ...]
    available: tuple[int, ...]  # the variants that the next chunk is stored in
    work: float = 1.0

    def __post_init__(self) -> None:
        assert self.remaining >= 1, self.remaining
        assert len(self.sizes_bytes) == len(self.profile.variants)
        assert self.available, "a chunk is stored in some variant"


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, situation: Situation) -> int:
        """One of ``situation.available``."""


_TIE = 1e-9


class Outlook(Protocol):
    def paths(self, num_chunks: int) -> Sequence[Sequence[float]]:
        """Bits per second while each of the next chunks is on the link: courses that it may take, equally likely."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Ours: the variant from which the whole fetch ends soonest, in the mean over the courses that the link may take.

    Each variant is tried for the next chunk, and after it each for all that follow, through a model of link and pool
    that knows what the decoders have before them; the continuation that is best in the mean counts. Since every chunk
    is decided anew, what comes out is not confined to such plans. Of variants that end at the same time the smallest:
    it leaves more of the link to others.

    ``outlook``: what the link is expected to do after these transfers. ``horizon``: chunks to look ahead, at most 64,
    after which a fetch is taken to end; time goes with it.
    """

    name: str = "ours"
    outlook: Callable[[Sequence[Transfer]], Outlook] = robust
    horizon: int = 32

    def choose(self, situation: Situation) -> int:
        if len(situation.available) == 1:
            return situation.available[0]
        paths = self.outlook(situation.transfers).paths(min(situation.remaining, self.horizon))
        now = Pipeline.from_state(situation.profile, situation.pool, work=situation.work)
        # Once for all plans: as long as others wait, it is all one when exactly a chunk comes that is decoded after
        # them.
        now.run_until_waiting(len(situation.pool.sessions))
        scores = {variant: self._finish_s(now, variant, paths, situation) for variant in situation.available}
        best = min(scores.values())
        soonest = [v for v, score in scores.items() if score <= best * (1 + _TIE)]
        return min(soonest, key=lambda v: (situation.sizes_bytes[v], v))

    def _finish_s(self, now: Pipeline, variant: int, paths: Sequence[Sequence[float]], situation: Situation) -> float:
        """When the fetch ends that goes on with this variant, and after it with whichever is best: the sum over the
        paths, each of which is the link's bits per second, by chunk."""
        sizes = situation.sizes_bytes
        sums = dict.fromkeys(situation.available, 0.0)
        for first_bps, *rest_bps in paths:
            after, link_free_s = now.copy(), sizes[variant] * 8 / first_bps
            after.deliver_at(link_free_s, variant, -1)
            for following in sums:
                sums[following] += _finish_s(after, following, sizes[following], rest_bps, link_free_s)
        return min(sums.values())


def _finish_s(
    pipeline: Pipeline, variant: int, size_bytes: int, bandwidth_bps: Sequence[float], link_free_s: float
) -> float:
    """When the last of these chunks is decoded, if they are transmitted one after the other from ``link_free_s`` on."""
    rollout = pipeline.copy()
    for bps in bandwidth_bps:
        link_free_s += size_bytes * 8 / bps
        rollout.deliver_at(link_free_s, variant, -1)
    return rollout.drained_s()
