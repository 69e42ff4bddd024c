"""The interface of device mode's cache to the scheduler's hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

from sgl_kvfetch.plugin.device.prefill import PrefillMeter, PrefillSpeed


class SteppedCache(ABC):
    """A radix cache that the scheduler steps. Its methods run on the scheduler's thread."""

    @cached_property
    def prefill_meter(self) -> PrefillMeter:
        return PrefillMeter()

    @property
    def prefill_speed(self) -> PrefillSpeed:
        """The speed that this rank measured; other ranks measure different values."""
        return self.prefill_meter.speed

    @abstractmethod
    def step(self, reserved_tokens: Callable[[], int]) -> None:
        """Process the work that has ended since the last step, and begin what can begin.

        ``reserved_tokens`` returns how many slots running requests will still need; called only if slots are wanted."""

    @abstractmethod
    def has_pending_cache_operations(self) -> bool:
        """Return whether slots or locks are held for anything but requests."""

    @abstractmethod
    def is_parked(self, handle: Any) -> bool:
        """Return whether a request waits for its fetch."""

    @abstractmethod
    def queued(self, handle: Any, urgency: int) -> None:
        """Note that a request is in the waiting queue. If the order is by priority, higher urgency goes first."""

    @abstractmethod
    def take_changed(self) -> list[Any]:
        """Return the handles of requests whose ``is_parked`` may have changed since the last call."""

    @abstractmethod
    def end_all(self) -> None:
        """End all work under way at once. The requests that wait for it go on without it."""

    @abstractmethod
    def clear_storage_backend(self) -> bool:
        """Empty the store, while an operator waits. Return whether it succeeded."""
