"""Lists all methods, and selects them by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.codec.baselines import baselines
from benchmarks.codec.baselines.kvtc.method import kvtc_methods
from benchmarks.codec.method import Method
from benchmarks.codec.ours import our_methods
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.quant.profile import Profile

_NEEDS = (("klt", "--profile"), ("kvtc", "--calibrate-text"))


def all_methods(profile: Profile | None, *, can_calibrate: bool = False) -> list[Method]:
    """Return all methods. ``can_calibrate``: include KVTC; the caller must set its ``fit`` before it encodes."""
    methods = [*our_methods(profile), *baselines(), *(kvtc_methods() if can_calibrate else [])]
    assert len({method.name for method in methods}) == len(methods)
    return methods


def select(methods: Sequence[Method], patterns: Sequence[str]) -> list[Method]:
    """Return the methods with names that match a shell-style pattern; all if there are no patterns.

    Raises ConfigError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(method.name, pattern) for method in methods):
            names = ", ".join(method.name for method in methods)
            hints = [f"; {family} needs {option}" for family, option in _NEEDS if pattern.startswith(family)]
            raise ConfigError(f"no method matches {pattern!r}; known are {names}{''.join(hints)}")
    return [m for m in methods if not patterns or any(fnmatchcase(m.name, pattern) for pattern in patterns)]
