"""What the scheduler's hooks know of device mode's cache."""

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
        """As this rank measured it; other ranks measure something else."""
        return self.prefill_meter.speed

    @abstractmethod
    def step(self, reserved_tokens: Callable[[], int]) -> None:
        """Take in what has ended since the last step, and begin what can begin.

        ``reserved_tokens``: how many slots requests that run will need yet; asked only if slots are wanted."""

    @abstractmethod
    def has_pending_cache_operations(self) -> bool:
        """Whether slots or locks are held for anything but requests."""

    @abstractmethod
    def is_parked(self, handle: Any) -> bool:
        """Whether a request waits for its fetch."""

    @abstractmethod
    def queued(self, handle: Any, urgency: int) -> None:
        """A request is in the waiting queue. The more urgent is fetched first, where the order is by priority."""

    @abstractmethod
    def take_changed(self) -> list[Any]:
        """Handles of the requests of which ``is_parked`` may say another thing than at the last call."""

    @abstractmethod
    def end_all(self) -> None:
        """End what is under way at once. The requests that it is for go on without."""

    @abstractmethod
    def clear_storage_backend(self) -> bool:
        """Empty the store, which an operator waits for. Whether that was possible."""
