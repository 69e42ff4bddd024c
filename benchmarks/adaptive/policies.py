"""The policies that ours is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.plane.adapt.estimate import Transfer
from sgl_kvfetch.plane.adapt.policy import Situation


@dataclass(frozen=True, slots=True)
class Fixed:
    """Chooses always the same variant. For a chunk without it, chooses the next larger one, or else the largest."""

    variant: int
    name: str

    def choose(self, situation: Situation) -> int:
        larger = [v for v in situation.available if v >= self.variant]
        return min(larger) if larger else max(situation.available)


@dataclass(frozen=True, slots=True)
class MinimalBubble:
    """KVFetcher's algorithm 1 (section 3.3.2): choose the variant whose transmit and decode times differ least.

    The goodput is that of the last chunk. The decode time is the table's at the pool's load, plus the switching penalty
    if the variant differs from the last one.

    Where we know of nothing in the paper, we assume: before the first chunk, without a goodput, the largest variant is
    chosen; the load counts the pool's busy sessions and the next chunk, up to the number of sessions; of equal variants
    the larger is chosen.
    """

    name: str = "algorithm1"

    def choose(self, situation: Situation) -> int:
        goodput_bps = last_chunk(situation.transfers)
        if goodput_bps is None:
            return max(situation.available)
        load = min(situation.pool.num_busy + 1, len(situation.pool.sessions))

        def bubble_s(variant: int) -> float:
            transmit_s = situation.sizes_bytes[variant] * 8 / goodput_bps
            decode_s = situation.profile.decode_time_s(variant, load) * situation.work
            if situation.previous is not None and variant != situation.previous:
                decode_s += situation.profile.variants[variant].switch_s
            return abs(transmit_s - decode_s)

        return min(situation.available, key=lambda v: (bubble_s(v), -v))


def last_chunk(transfers: Sequence[Transfer]) -> float | None:
    """Return the last chunk's goodput in bits per second (KVFetcher, section 3.3.2). None before the first."""
    return transfers[-1].goodput_bps if transfers else None
