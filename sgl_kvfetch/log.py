"""Text for logs and terminals: rate-limited warnings, what fails from its beginning to its end, and text from elsewhere
without control characters."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

_PERIOD_S = 60.0
_AGAIN_S = 600.0
_MESSAGE_CHARS = 240
_LINE_CHARS = 2000
_MOST_KINDS = 1000  # that are told apart, such as one a client; further ones share a line


class LimitedLogger:
    """Logs each kind of event at once, and its repetitions once a minute, with their count. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        """Do as `log`, at the level of warnings."""
        self.log(logging.WARNING, kind, message)

    def log(self, level: int, kind: str, message: str) -> None:
        """Log ``message`` as `one_line`. If ``kind`` was logged less than a minute ago, only count it for the next
        message."""
        now = time.monotonic()
        with self._lock:
            if kind not in self._next_s and len(self._next_s) >= _MOST_KINDS:
                self._next_s = {each: next_s for each, next_s in self._next_s.items() if next_s > now}
                self._suppressed = {each: n for each, n in self._suppressed.items() if each in self._next_s}
                kind = kind if len(self._next_s) < _MOST_KINDS else "others"
            if now < self._next_s.get(kind, 0.0):
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._next_s[kind] = now + _PERIOD_S
            suppressed = self._suppressed.pop(kind, 0)
        more = f" (and {suppressed} more like it)" if suppressed else ""
        self._logger.log(level, "%s%s", one_line(message), more)


class Troubles:
    """Logs what fails again and again: a warning when a cause begins, and every ten minutes while it lasts, and one
    line when it is over. A cause that comes and goes is told once a minute. Thread-safe."""

    def __init__(self, logger: logging.Logger, name: str) -> None:
        """``name``: of what fails, for the line that says that it works again."""
        self._logger, self._name = logger, name
        self._lock = threading.Lock()
        self.lasting: dict[str, _Trouble] = {}  # by cause; empty while all works
        self._quiet_until_s: dict[str, float] = {}

    def failed(self, cause: str, stage: str, message: str) -> None:
        """``cause``: one of a fixed set of words. ``stage``: what was tried."""
        now_s = time.monotonic()
        with self._lock:
            trouble = self.lasting.setdefault(cause, _Trouble(now_s, set(), 0, is_told=False))
            trouble.stages.add(stage)
            trouble.count += 1
            if now_s < self._quiet_until_s.get(cause, 0.0):
                return
            count = trouble.count
            self._quiet_until_s[cause] = now_s + (_AGAIN_S if trouble.is_told else _PERIOD_S)
            trouble.is_told = True
        times = f" ({count} times since it began)" if count > 1 else ""
        self._logger.warning("%s%s", one_line(message), times)

    def worked(self, *stages: str) -> None:
        """Record that stages work: what kept one of them from that is over."""
        now_s = time.monotonic()
        with self._lock:
            over = [cause for cause, each in self.lasting.items() if not each.stages.isdisjoint(stages)]
            ended = {cause: self.lasting.pop(cause) for cause in over}
            for cause, each in ended.items():
                if each.is_told:
                    self._quiet_until_s[cause] = min(self._quiet_until_s[cause], now_s + _PERIOD_S)
        for cause, each in ended.items():
            if each.is_told:
                about = self._name, now_s - each.since_s, cause, each.count
                self._logger.info("kvfetch: %s works again after %.0f s (%s, %d times)", *about)


@dataclass
class _Trouble:
    since_s: float
    stages: set[str]
    count: int
    is_told: bool


def printable(text: str) -> str:
    """Replace unprintable characters: what comes from a server or a store must not control a terminal, or begin lines
    of a log."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: object) -> str:
    """Return text as one printable line of at most 2,000 characters: an error may quote what others have written."""
    return printable(str(text)[:_LINE_CHARS])


def brief(error: Exception) -> str:
    """Return an exception's message in one line: PyNvVideoCodec's spread over several, and the first says little."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE_CHARS]
