"""Fetch pages, or have them computed, by what this rank has measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.plan import PageSource, total_bytes
from sgl_kvfetch.plugin.device.choice import FetchCost, FetchOrRecompute
from sgl_kvfetch.plugin.device.counts import DECISIONS
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed


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
            DECISIONS.labels("fetch", "configured").inc()
            return True
        num_tokens = len(sources) * self._page_size
        cost = self._cost(sources, num_ahead)
        decision = self._choice.decide(num_tokens, cost, self._speed.seconds_for(num_tokens))
        DECISIONS.labels("fetch" if decision.is_fetched else "recompute", decision.reason).inc()
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
