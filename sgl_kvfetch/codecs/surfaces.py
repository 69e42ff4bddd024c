"""Memory on the GPU that video decoders take for their surfaces, counted against a bound."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary

# Of one decoder: those that NVIDIA's parser asks for, which are the stream's reference pictures and a few more, and two
# for output. An estimate: `scripts/gpu_check` puts what is counted beside what is taken, and is to correct it.
NUM_SURFACES = 8
MAX_SURFACE_BYTES = 256 << 20  # of all decoders of a process together


def surface_bytes(planes_a_picture: int, width: int, height: int) -> int:
    """What a decoder takes, about. ``planes_a_picture``: 3 for 4:4:4, 1 for 4:2:0, which has half as much chroma as
    luma. ``width``, ``height``: of the largest pictures that it is made for."""
    rows = 3 * height if planes_a_picture == 3 else height * 3 // 2
    return NUM_SURFACES * rows * width


class SurfaceOwner(Protocol):
    """Whoever has a decoder, or none at the moment."""

    lock: Lock  # held while it decodes, and while somebody else gives up its decoder

    def give_up(self) -> None:
        """Drop the decoder, and give back what it took. With the lock held."""


class SurfaceBudget:
    """Room for decoders. One lock guards it, with which nobody waits: of the owners' locks, those that are free are
    taken. From any thread.

    An owner that is nobody's any more takes nothing.
    """

    def __init__(self, limit_bytes: int | None = MAX_SURFACE_BYTES) -> None:
        self.limit_bytes = limit_bytes  # may be set at any time; None: whatever is asked for is there
        self._lock = Lock()
        self._taken: WeakKeyDictionary[SurfaceOwner, int] = WeakKeyDictionary()  # the longest unused first

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def take(self, owner: SurfaceOwner, num_bytes: int) -> bool:
        """For a decoder that ``owner``, whose lock is held, is about to make. If there is no room, idle decoders of
        others are given up, the longest unused first; False if all of them are not enough. One decoder may always be,
        however large."""
        with ExitStack() as claims:
            with self._lock:
                assert owner not in self._taken
                idle = self._claim_idle(num_bytes, claims)
                if idle is None:
                    return False
                self._taken[owner] = num_bytes  # beside what is still to be given back: others find less room, not more
            for other in idle:
                other.give_up()
        return True

    def give_back(self, owner: SurfaceOwner) -> None:
        """What ``owner`` has taken, if anything. Its decoder is gone."""
        with self._lock:
            self._taken.pop(owner, None)

    def used(self, owner: SurfaceOwner) -> None:
        """Its decoder was, just now."""
        with self._lock:
            if owner in self._taken:
                self._taken[owner] = self._taken.pop(owner)

    def _claim_idle(self, num_bytes: int, claims: ExitStack) -> list[SurfaceOwner] | None:
        """Whom to give up for so much room: none if it is there, None if it cannot be had. Their locks are taken, until
        ``claims`` ends."""
        taken = dict(self._taken.items())
        idle: list[SurfaceOwner] = []
        for other in list(taken):
            if self._has_room(taken, num_bytes):
                break
            if other.lock.acquire(blocking=False):
                claims.callback(other.lock.release)
                idle.append(other)
                del taken[other]
        return idle if self._has_room(taken, num_bytes) else None

    def _has_room(self, taken: dict[SurfaceOwner, int], num_bytes: int) -> bool:
        return self.limit_bytes is None or not taken or sum(taken.values()) + num_bytes <= self.limit_bytes
