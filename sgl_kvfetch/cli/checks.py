"""Results of the checks that ``kvfetch doctor`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.errors import ConfigError

Status = Literal["yes", "no", "warn"]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report. ``no``: missing, and host mode needs it. ``warn``: missing, but host mode works."""

    name: str
    status: Status
    found: str
    advice: str = ""  # how to fix it; required unless the status is "yes"

    def __post_init__(self) -> None:
        assert self.status == "yes" or self.advice, self.name


def run_check(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Return the check's rows. An unexpected exception, from a driver for example, becomes a row as well.

    Raises ConfigError if the user's input is invalid.
    """
    try:
        return check()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit too: SGLang's modules may raise it on import
        advice = "repair or install what the message names"
        return [Check(name, "no", f"{type(e).__name__}: {first_line(e)}", advice)]


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
