"""What the scheduler's hooks know of device mode's cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SteppedCache(ABC):
    """A radix cache that the scheduler steps. Its methods run on the scheduler's thread."""

    @abstractmethod
    def step(self) -> None:
        """Take in what has ended since the last step, and begin what can begin."""

    @abstractmethod
    def has_pending_cache_operations(self) -> bool:
        """Whether slots or locks are held for anything but requests."""

    @abstractmethod
    def is_parked(self, handle: Any) -> bool:
        """Whether a request waits for its fetch."""

    @abstractmethod
    def take_changed(self) -> list[Any]:
        """Handles of the requests of which ``is_parked`` may say another thing than at the last call."""

    @abstractmethod
    def clear_storage_backend(self) -> bool:
        """Empty the store, which an operator waits for. Whether that was possible."""
