"""What a decode pool is doing, and whether it keeps to its profile, from what sessions begin and end.

Pure: moments come in as arguments. The decode pool and the simulator both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.adapt.decode_profile import Decoded, DecodeProfile, corrections
from sgl_kvfetch.adapt.pipeline import PoolState, SessionState

_MOST_DECODED = 64
_LEAST_LEFT = 0.02  # of a chunk that takes longer than it should


@dataclass(slots=True)
class _Active:
    variant: int
    switch_left_s: float
    work: float
    done: float = 0.0  # chunks, at the profile's pace


class PoolTracker:
    """Implements ``pipeline.Observer``. Moments must not fall."""

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

    def started(self, at_s: float, session: int, variant: int, switches: bool, work: float, item: int) -> None:
        self._advance(at_s)
        self._configured[session] = variant
        switch_s = self._profile.variants[variant].switch_s if switches else 0.0
        self._active[session] = _Active(variant, switch_s, work)

    def finished(self, at_s: float, session: int, item: int) -> None:
        self._advance(at_s)
        active = self._active.pop(session)
        ratio = active.done / active.work
        if ratio > 0:  # else it ended while it should have been switching, which says nothing of decoding
            self._decoded = [*self._decoded[1 - _MOST_DECODED :], Decoded(active.variant, ratio)]

    def abandoned(self, at_s: float, session: int) -> None:
        """It ended without having decoded its chunk: nothing is to be learned from it."""
        self._advance(at_s)
        del self._active[session]

    def state(self, at_s: float, waiting: Sequence[int]) -> PoolState:
        """The pool as the corrected profile has it. ``waiting``: variants of the chunks without a session."""
        self._advance(at_s)
        factors = self._factors()
        sessions = [SessionState(variant) for variant in self._configured]
        for i, active in self._active.items():
            left = active.work - active.done / factors.get(active.variant, 1.0)
            sessions[i] = SessionState(active.variant, active.switch_left_s, max(left, _LEAST_LEFT * active.work))
        return PoolState(tuple(sessions), tuple(waiting))

    def _factors(self) -> dict[int, float]:
        """A chunk that is still not done although it should be tells as much as one that is."""
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
