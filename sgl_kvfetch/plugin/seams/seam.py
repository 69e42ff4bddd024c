"""One place in SGLang that we depend on."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Use(enum.Enum):
    """What we do at a seam. The first four are hooks; their values are those of SGLang's ``HookType``."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    SUBCLASS = "subclass"
    CALL = "call"
    READ = "read"


class Scope(enum.Enum):
    """When a seam is needed."""

    GATE = "gate"  # to accept the backend's name and to refuse a launch that cannot work
    HOST = "host"  # for the storage backend behind the host pool
    DEVICE = "device"  # for the radix cache without a host tier
    CPU_ENGINE = "cpu_engine"  # to run without an accelerator


@dataclass(frozen=True)
class Seam:
    """One place in SGLang that we depend on.

    ``params`` are the exact parameter names of a callable, ``has`` are fields or attributes of a class, and
    ``mentions`` are names that a function's own code must use: attributes that only exist on instances.
    """

    path: str
    use: Use
    why: str
    hook: str | None = None
    params: tuple[str, ...] | None = None
    has: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    scope: Scope = Scope.HOST

    def __post_init__(self) -> None:
        is_hook = self.use in (Use.BEFORE, Use.AFTER, Use.AROUND, Use.REPLACE)
        assert is_hook == (self.hook is not None), self.path
