"""Text for logs and terminals: rate-limited warnings, and text from elsewhere without control characters."""

from __future__ import annotations

import logging
import threading
import time

_PERIOD_S = 60.0
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
