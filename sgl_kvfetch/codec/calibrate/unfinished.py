"""A file with what a calibration has done so far, so that one that was interrupted goes on."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

_EVERY_S = 60.0
_STATE_VERSION = 3  # of what the state consists of; files of other versions are not used


class Unfinished:
    """``inputs``: what the calibration depends on. The state that other inputs left is not used."""

    def __init__(self, path: Path, inputs: Sequence[Any]) -> None:
        self._path = path
        self._key = xxhash.xxh3_128_hexdigest(repr([_STATE_VERSION, *map(_plain, inputs)]).encode())
        self._written_s = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Return the state, or None if there is none for these inputs."""
        try:
            found = torch.load(self._path, weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError):
            return None
        return found["state"] if isinstance(found, dict) and found.get("key") == self._key else None

    def is_due(self) -> bool:
        """Return whether the state was last written a minute ago."""
        return time.monotonic() >= self._written_s + _EVERY_S

    def write(self, state: dict[str, Any]) -> None:
        partial = self._path.with_name(f"{self._path.name}.new")
        torch.save({"key": self._key, "state": state}, partial)
        partial.replace(self._path)
        self._written_s = time.monotonic()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _plain(x: Any) -> Any:
    return [window.tolist() for window in x] if isinstance(x, list) else x
