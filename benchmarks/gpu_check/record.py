"""Records a step's findings on disk at once, so that a killed step loses none of them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]


class SkippedError(Exception):
    """A step cannot run here. The message is the reason."""


class Record:
    """A step's findings, written to ``path`` at each change. A step with recorded failures always ends as failed."""

    def __init__(self, path: Path, limit_s: float = math.inf) -> None:
        """``limit_s``: the step is ended after so many seconds."""
        self.path = path
        self._deadline_s = time.monotonic() + limit_s
        self._rows: list[dict[str, Any]] = []
        self._failures: list[str] = []
        self._notes: list[str] = []
        self._write()

    @property
    def left_s(self) -> float:
        """The seconds until the step is ended."""
        return self._deadline_s - time.monotonic()

    def row(self, table: str, **columns: Any) -> None:
        self._rows.append({"table": table, **columns})
        self._write()

    def note(self, text: str) -> None:
        """Record something that was left out or a missed goal. It does not make the step fail."""
        self._notes.append(text)
        self._write()

    def fail(self, reason: str) -> None:
        self._failures.append(reason)
        self._write()

    def end(self, outcome: Outcome, reason: str = "") -> None:
        if reason and outcome == "failed":
            self._failures.append(reason)
        if self._failures:
            outcome, reason = "failed", "; ".join(self._failures)
        self._write(outcome, reason)

    def _write(self, outcome: Outcome | None = None, reason: str = "") -> None:
        content = {
            "outcome": outcome,
            "reason": reason or "; ".join(self._failures),
            "rows": self._rows,
            "notes": self._notes,
        }
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.path)
