"""Fetch a prefix, or compute it?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.plan import PageSource, total_bytes
from sgl_kvfetch.metrics import DEVICE_DECISIONS
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed

# To compute must be so much faster before we change over to it: computing takes the engine from other requests, and
# estimates that are nearly alike must not make requests go one way and the other in turn.
MARGIN = 1.25

Reason = Literal["faster", "unmeasured", "link", "decoder"]


@dataclass(frozen=True, slots=True)
class FetchCost:
    """What a fetch will take, as measured. None: not measured yet, or too long ago."""

    transmit_s: float | None  # what is ahead of it on the link, too
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """The stages overlap."""
        return None if self.transmit_s is None else max(self.transmit_s, self.decode_s or 0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    is_fetched: bool
    reason: Reason


class FetchOrRecompute:
    """Pure. Decides with hysteresis, for prompts of about one length (within a factor of two) together. What cannot be
    estimated is fetched, and is measured so."""

    def __init__(self) -> None:
        self._recomputed: set[int] = set()  # lengths, as powers of two

    def decide(self, num_tokens: int, cost: FetchCost, recompute_s: float | None) -> Decision:
        """``recompute_s``: what the engine would take to compute these tokens, if it had nothing else to do."""
        fetch_s = cost.seconds
        if fetch_s is None or recompute_s is None:
            return Decision(True, "unmeasured")
        length = num_tokens.bit_length()
        if fetch_s <= recompute_s * (1.0 if length in self._recomputed else MARGIN):
            self._recomputed.discard(length)
            return Decision(True, "faster")
        self._recomputed.add(length)
        return Decision(False, "link" if cost.transmit_s == fetch_s else "decoder")


class Verdicts:
    """Asked on the event loop. Of this rank; only what all ranks agree on may depend on it."""

    def __init__(self, config: KVFetchConfig, fetcher: Fetcher, speed: PrefillSpeed, page_size: int) -> None:
        self._config = config
        self._fetcher = fetcher
        self._speed = speed
        self._page_size = page_size
        self._choice = FetchOrRecompute()

    def is_fetched(self, sources: Sequence[PageSource], num_ahead: int) -> bool:
        """Whether to fetch these pages. ``num_ahead``: pages that are to be fetched before them."""
        if not sources:
            return False
        if self._config.recompute == "never":
            DEVICE_DECISIONS.labels("fetch", "configured").inc()
            return True
        num_tokens = len(sources) * self._page_size
        cost = self._cost(sources, num_ahead)
        decision = self._choice.decide(num_tokens, cost, self._speed.seconds_for(num_tokens))
        DEVICE_DECISIONS.labels("fetch" if decision.is_fetched else "recompute", decision.reason).inc()
        return decision.is_fetched

    def _cost(self, sources: Sequence[PageSource], num_ahead: int) -> FetchCost:
        """Pages ahead are taken to be like these."""
        size_bytes = total_bytes(sources) * (1 + num_ahead / len(sources))
        goodput_bps = self._fetcher.link.goodput_bps(time.monotonic())
        decoded_bytes_per_s = self._fetcher.decode_rate.bytes_per_s
        return FetchCost(
            None if goodput_bps is None else size_bytes * 8 / goodput_bps,
            None if decoded_bytes_per_s is None else size_bytes / decoded_bytes_per_s,
        )
