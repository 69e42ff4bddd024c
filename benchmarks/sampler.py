"""Measures the largest growth of memory while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

_SAMPLE_S = 0.001


class Sampler:
    """Reads several numbers of bytes every millisecond. ``peaks`` holds each one's largest growth since the start."""

    def __init__(self, read: Callable[[], Sequence[int]]) -> None:
        self._read = read
        self._base = read()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peaks = [0] * len(self._base)
        self.num_samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            grown = (now - base for now, base in zip(self._read(), self._base, strict=True))
            self.peaks = list(map(max, self.peaks, grown))
            self.num_samples += 1
