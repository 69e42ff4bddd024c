"""The form of a check: what ``kvfetch doctor`` asks this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.errors import ConfigError

Status = Literal["yes", "no", "warn"]


@dataclass(frozen=True, slots=True)
class Check:
    """``no``: host mode needs it, and it is not there. ``warn``: not there, and host mode works without."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to do about anything but a yes

    def __post_init__(self) -> None:
        assert self.status == "yes" or self.advice, self.name


def run_check(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """The check's rows; a failure that it does not foresee (drivers have many ways) is a row as well.

    Raises ConfigError: what the user asked for makes no sense.
    """
    try:
        return check()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit too: SGLang's modules may raise it on import
        advice = "see the message: something that it names is broken or missing"
        return [Check(name, "no", f"{type(e).__name__}: {first_line(e)}", advice)]


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
