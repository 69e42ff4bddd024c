"""Measures how long other threads keep a Python thread from running."""

from __future__ import annotations

import threading
import time
from typing import Self

TICK_S = 0.001


class Ticker:
    """A thread that sleeps for a millisecond, over and over. ``longest_s``: the most seconds that passed between two of
    its ticks. The gap is long if another thread holds the interpreter lock, for example while the driver waits."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = threading.Event()
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.perf_counter()
        self._began.set()
        while not self._is_over.is_set():
            time.sleep(TICK_S)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s
