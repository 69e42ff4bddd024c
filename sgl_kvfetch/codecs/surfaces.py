"""A budget for the GPU memory that video decoders use for their surfaces."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary

# Surfaces of one decoder: PyNvVideoCodec asks for as many as NVIDIA's parser does and four more, and two for output.
# The parser's number is an estimate; `scripts/gpu_check` compares the sum with the memory that is really used.
NUM_SURFACES = 4 + 4 + 2
MAX_SURFACE_BYTES = 256 << 20  # of all decoders of a process together


def surface_bytes(planes_a_picture: int, width: int, height: int) -> int:
    """Estimate the memory of a decoder. ``planes_a_picture``: 3 for 4:4:4, 1 for 4:2:0, which has half as much chroma
    as luma. ``width``, ``height``: of the largest pictures that the decoder supports."""
    rows = 3 * height if planes_a_picture == 3 else height * 3 // 2
    return NUM_SURFACES * rows * width


class SurfaceOwner(Protocol):
    """An object that may hold a decoder."""

    lock: Lock  # held while the owner decodes, and while another owner makes it give up its decoder

    def give_up(self) -> None:
        """Drop the decoder and return its memory to the budget. The caller holds the lock."""


class SurfaceBudget:
    """Limits the memory of all decoders. Thread-safe.

    The budget's lock is never held while waiting: of the owners' locks, it only takes those that are free. An owner
    that has been garbage-collected takes no memory.
    """

    def __init__(self, limit_bytes: int | None = MAX_SURFACE_BYTES) -> None:
        self.limit_bytes = limit_bytes  # may be set at any time; None: no limit
        self._lock = Lock()
        self._taken: WeakKeyDictionary[SurfaceOwner, int] = WeakKeyDictionary()  # the least recently used first

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def take(self, owner: SurfaceOwner, num_bytes: int) -> bool:
        """Reserve memory for a decoder that ``owner``, whose lock is held, is about to create. If there is no
        room, other owners give up idle decoders, the least recently used first. Returns False if that is not enough. A
        single decoder is always allowed, however large."""
        with ExitStack() as claims:
            with self._lock:
                assert owner not in self._taken
                idle = self._claim_idle(num_bytes, claims)
                if idle is None:
                    return False
                self._taken[owner] = num_bytes  # before the others give theirs back: never underestimate the use
            for other in idle:
                other.give_up()
        return True

    def give_back(self, owner: SurfaceOwner) -> None:
        """Release what ``owner`` has taken, if anything. Its decoder is gone."""
        with self._lock:
            self._taken.pop(owner, None)

    def used(self, owner: SurfaceOwner) -> None:
        """Mark the decoder of ``owner`` as the most recently used."""
        with self._lock:
            if owner in self._taken:
                self._taken[owner] = self._taken.pop(owner)

    def _claim_idle(self, num_bytes: int, claims: ExitStack) -> list[SurfaceOwner] | None:
        """Choose the owners to give up so that ``num_bytes`` fit. Returns None if idle owners do not suffice. The locks
        of the chosen are held until ``claims`` closes."""
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
