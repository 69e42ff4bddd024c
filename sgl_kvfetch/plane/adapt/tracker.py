"""Tracks a decode pool's state and compares decode times with the profile, from the sessions' starts and ends.

Pure: times are arguments. The decode pool and the simulator both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.plane.adapt.decode_profile import Decoded, DecodeProfile, corrections
from sgl_kvfetch.plane.adapt.pipeline import PoolState, SessionState

_MOST_DECODED = 64
_LEAST_LEFT = 0.02  # fraction of a late chunk that is assumed to remain


@dataclass(slots=True)
class _Active:
    variant: int
    switch_left_s: float
    work: float
    done: float = 0.0  # chunks that the profile expects to be done by now


class PoolTracker:
    """Is called when a session starts or ends a chunk. Times must not decrease."""

    def __init__(self, profile: DecodeProfile, num_sessions: int) -> None:
        self._profile = profile
        self._configured: list[int | None] = [None] * num_sessions
        self._active: dict[int, _Active] = {}
        self._now_s = 0.0
        self._decoded: list[Decoded] = []

    @property
    def corrected_profile(self) -> DecodeProfile:
        factors = self._factors()
        return self._profile.corrected(factors) if factors else self._profile

    def started(self, at_s: float, session: int, variant: int, switches: bool, work: float) -> None:
        self._advance(at_s)
        self._configured[session] = variant
        switch_s = self._profile.variants[variant].switch_s if switches else 0.0
        self._active[session] = _Active(variant, switch_s, work)

    def finished(self, at_s: float, session: int) -> None:
        self._advance(at_s)
        active = self._active.pop(session)
        ratio = active.done / active.work
        if ratio > 0:  # otherwise it ended within the expected switching time, which says nothing about decoding
            self._decoded = [*self._decoded[1 - _MOST_DECODED :], Decoded(active.variant, ratio)]

    def abandoned(self, at_s: float, session: int) -> None:
        """Forget a chunk that ended without being decoded; its time says nothing."""
        self._advance(at_s)
        del self._active[session]

    def state(self, at_s: float, waiting: Sequence[int]) -> PoolState:
        """Return the pool's state by the corrected profile. ``waiting``: variants of the chunks without a session."""
        self._advance(at_s)
        factors = self._factors()
        sessions = [SessionState(variant) for variant in self._configured]
        for i, active in self._active.items():
            left = active.work - active.done / factors.get(active.variant, 1.0)
            sessions[i] = SessionState(active.variant, active.switch_left_s, max(left, _LEAST_LEFT * active.work))
        return PoolState(tuple(sessions), tuple(waiting))

    def _factors(self) -> dict[int, float]:
        """Return the corrections. A running chunk that is already late counts like a finished one."""
        late = [Decoded(a.variant, a.done / a.work) for a in self._active.values() if a.done > a.work]
        return corrections([*self._decoded, *late], len(self._profile.variants))

    def _advance(self, at_s: float) -> None:
        elapsed_s = at_s - self._now_s
        self._now_s = at_s
        concurrency = len(self._active)
        for active in self._active.values():
            decoding_s = max(0.0, elapsed_s - active.switch_left_s)
            active.switch_left_s = max(0.0, active.switch_left_s - elapsed_s)
            active.done += decoding_s / self._profile.decode_time_s(active.variant, concurrency)
