"""Counts why lookups, fetches and writes fall short, and notes it for the request that is being served."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from sgl_kvfetch import metrics
from sgl_kvfetch.reasons import Reason

# Tasks that a request's task begins have a copy of its context, with the same list in it.
_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)


def miss(stage: str, reason: str) -> None:
    """Count that a lookup, a fetch or a write fell short. ``reason``: one of `reasons.Reason`."""
    metrics.MISSES.labels(stage, reason).inc()
    note(reason)


def shortfall(reasons: Sequence[str]) -> str:
    """Return the reason to tell of what was noted: the first one, and that prompts differ only if there is no other.
    That is found before anything can go wrong with the pages that they share."""
    return min(reasons, key=lambda reason: reason == Reason.DIVERGES, default="")


def note(reason: str) -> None:
    """Note why the request that this task serves gets less than is stored. Without one, do nothing."""
    if (noted := _noted.get()) is not None:
        noted.append(reason)


def noted_here() -> list[str]:
    """Return the list of what is noted from now on, in this task and in those that it begins. The task must be the
    request's own."""
    reasons: list[str] = []
    _noted.set(reasons)
    return reasons
