"""How long a request waits for its prefix in host mode.

It waits as long as SGLang's prefetch policy says, at most ``fetch_timeout_s``. SGLang's default policy, ``timeout``,
gives a prefetch 1 s and 0.25 s per 1,024 tokens. Then it keeps the complete batches of 128 pages and drops the rest,
often all of a prefix. So that budget is replaced unless the user has set one. A fetch ends a little before SGLang's
budget does, so that the pages that have arrived count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sgl_kvfetch.plugin.versions import budget_pages, is_deadline_expired

SGLANG_BUDGET = (1.0, 0.25)  # SGLang's defaults of prefetch_timeout_base and prefetch_timeout_per_ki_token
_BACKSTOP_S = 1.0  # how long SGLang waits for a fetch that should have ended
_MARGIN_S = 0.1  # what SGLang needs to notice that a fetch has ended

# Why a fetch was given up, by the reason that metrics count.
GIVEN_UP = {
    "policy": "SGLang's prefetch policy no longer waits for it: see --hicache-storage-prefetch-policy, "
    "prefetch_timeout_base and prefetch_timeout_per_ki_token",
    "cancelled": "the request was aborted, or SGLang flushes its cache, detaches its storage or stops",
}


def choose_budget(base_s: float, per_ki_token_s: float, fetch_timeout_s: float) -> tuple[float, float]:
    """Return SGLang's budget for a prefetch: ``fetch_timeout_s`` in place of SGLang's defaults, else the user's."""
    if (base_s, per_ki_token_s) == SGLANG_BUDGET:
        return fetch_timeout_s + _BACKSTOP_S, 0.0
    return base_s, per_ki_token_s


@dataclass(frozen=True, slots=True)
class Patience:
    """Knows how long SGLang waits for a prefetch. ``cache``: SGLang's radix cache, whose policy may change at run
    time."""

    cache: Any
    fetch_timeout_s: float

    def deadline_s(self, operation: Any) -> float:
        """Return when the fetch of a ``PrefetchOperation`` must end, in ``time.monotonic()``."""
        wait_s = self.fetch_timeout_s
        if self.cache.prefetch_stop_policy == "timeout":
            budget_s = self._budget_s(operation)
            wait_s = min(wait_s, max(budget_s - _MARGIN_S, budget_s / 2))
        return float(operation.start_time + wait_s)

    def reason(self, operation: Any) -> str:
        """Return why SGLang has terminated an operation: a key of `GIVEN_UP`."""
        if self.cache.prefetch_stop_policy != "timeout":
            return "policy" if self.cache.prefetch_stop_policy == "best_effort" else "cancelled"
        elapsed_s = time.monotonic() - operation.start_time
        return "policy" if is_deadline_expired(operation, elapsed_s, self._budget_s(operation)) else "cancelled"

    def _budget_s(self, operation: Any) -> float:
        pages = budget_pages(operation, self.cache.page_size)
        return float(self.cache.prefetch_timeout_base + pages * self.cache.prefetch_timeout_per_page)


def explain(policy: str, budget: tuple[float, float], fetch_timeout_s: float) -> str:
    """Return what SGLang's policy means for a request. ``budget``: as `choose_budget` returns it."""
    at_most = f"at most {fetch_timeout_s:g} s (fetch_timeout_s)"
    if policy == "best_effort":
        return "no request waits for its stored prefix: what is not there when its turn comes is computed"
    if policy == "timeout" and budget != choose_budget(*SGLANG_BUDGET, fetch_timeout_s):
        at_most += f" and {budget[0]:g} s + {budget[1]:g} s per 1,024 tokens (prefetch_timeout_*)"
    return f"a request waits for its stored prefix {at_most}; what is not there then is computed"
