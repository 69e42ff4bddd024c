"""Lets requests compute while their last pages are being restored: the early start of KVFetcher (appendix A.3).

SGLang calls the pool's layer counter before it reads a layer. A request starts when all its bytes are here and sound,
so a pass waits for decoding and restoring only. Until the pass is over, the slots are private to the request. If a
layer does not come, the pass is thrown away, and its prompts are computed again without these pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.plugin.device.backend import Filling

logger = logging.getLogger(__name__)

_MOST_WAIT_S = 2.0  # how long one pass waits for all its layers together


class EarlyStarts:
    """The layer counter of SGLang's pool, and the slots that are still being filled while their requests compute.

    All methods run on the scheduler's thread."""

    def __init__(self, num_layers: int, agree: Callable[[bool], bool]) -> None:
        """``agree`` returns whether something is true on all ranks."""
        self.num_layers = num_layers
        self._agree = agree
        self._started: dict[str, Sequence[Filling]] = {}  # by request, from its admission to the end of its pass
        self._passing: list[Filling] = []
        self._next_layer = 0  # the first one that the pass has not read; -1 if it has read one that was not whole
        self._left_s = 0.0
        self._barred: set[str] = set()
        self._leavers: list[Any] = []  # SGLang's requests that must leave the last batch
        self._discarded: dict[int, list[Any]] = {}  # those that got no result, by batch

    @property
    def is_idle(self) -> bool:
        """Return whether no request has started early and waits for its pass."""
        return not self._started

    def may_start(self, request_id: str) -> bool:
        return request_id not in self._barred

    def bar(self, request_id: str) -> None:
        """Do not let a request start early again."""
        self._barred.add(request_id)

    def start(self, request_id: str, fillings: Sequence[Filling]) -> None:
        self._started[request_id] = fillings

    def slots(self, request_id: str) -> list[torch.Tensor]:
        """Return the request's private slots, one per token; none if it did not start early or its pass is over."""
        return [filling.slots for filling in self._started.get(request_id, ())]

    def forget_request(self, request_id: str) -> None:
        """Forget a request that is gone. Nothing writes to its slots any more."""
        self._barred.discard(request_id)
        self._close(self._started.pop(request_id, ()))

    # A forward pass

    def begin_pass(self, request_ids: Iterable[str]) -> None:
        self._passing = [filling for rid in request_ids for filling in self._started.get(rid, ())]
        self._next_layer, self._left_s = 0, _MOST_WAIT_S

    @property
    def consumer_index(self) -> int:
        """-1 if the pass need not wait for any layer. SGLang asks before it replays a whole pass as one graph."""
        return 0 if self._passing else -1

    def wait_until(self, layer: int) -> None:
        """Wait until the passing requests have ``layer``, counted from the pool's first. Called before it is read."""
        if not self._passing:
            return
        # Layers are asked for in order, K and V each once: a later one would mean that another was read without asking.
        began_s, is_whole = time.monotonic(), layer <= self._next_layer
        for filling in self._passing:
            left_s = began_s + self._left_s - time.monotonic()
            is_whole &= filling.layers.wait(layer, max(0.0, left_s))
            filling.publish()
        self._left_s -= time.monotonic() - began_s
        # What comes later is of no use to this pass.
        self._next_layer = max(self._next_layer, layer + 1) if is_whole else -1

    def end_pass(self, request_ids: Sequence[str]) -> bool:
        """Return whether the pass is valid: on all ranks, it has waited for each layer, and all layers came."""
        if not self._passing:
            return True
        self._passing = []
        metrics.EARLY_WAIT_SECONDS.observe(_MOST_WAIT_S - self._left_s)
        started = [rid for rid in request_ids if rid in self._started]
        fillings = [filling for rid in started for filling in self._started.pop(rid)]
        self._close(fillings)
        is_whole = self._agree(self._next_layer == self.num_layers)
        metrics.EARLY_PASSES.labels("whole" if is_whole else "discarded").inc()
        if not is_whole:
            logger.warning("kvfetch: pages of %d requests did not come while they computed", len(started))
        return is_whole

    # Passes without a result

    def discard(self, batch: int, requests: list[Any]) -> None:
        """Note that the requests got no result in a batch, and must be computed again."""
        self._leavers = self._discarded[batch] = requests

    def take_leavers(self) -> list[Any]:
        """Return the requests that must leave the last batch, once."""
        leavers, self._leavers = self._leavers, []
        return leavers

    def take_discarded(self, batch: int) -> list[Any]:
        """Return the requests that got no result in this batch, once."""
        return self._discarded.pop(batch, [])

    def _close(self, fillings: Iterable[Filling]) -> None:
        for filling in fillings:
            filling.close()
            filling.publish()
