"""What our policy is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.adapt.estimate import Transfer
from sgl_kvfetch.adapt.policy import Situation


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same variant; where a chunk lacks it, the next larger one, or else the largest there is."""

    variant: int
    name: str

    def choose(self, situation: Situation) -> int:
        larger = [v for v in situation.available if v >= self.variant]
        return min(larger) if larger else max(situation.available)


@dataclass(frozen=True, slots=True)
class MinimalBubble:
    """KVFetcher's algorithm 1 (section 3.3.2): the variant that takes most nearly as long to transmit as to decode.

    The link's goodput is that of the last chunk. Decoding takes what the table says at the pool's load, and the
    switching penalty if the variant is another than the last one.

    Readings of ours, where we know of nothing in the paper: before the first chunk, when there is no goodput, the
    largest variant; the load counts the chunks in the pool and the one to come, but no more than there are sessions;
    of equals, the larger variant.
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
    """KVFetcher's estimate (section 3.3.2), bits per second: what the last chunk saw. None before the first."""
    return transfers[-1].goodput_bps if transfers else None
