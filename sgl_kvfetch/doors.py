"""Opens the houses' doors: each name that a stub exports is imported at its first use. And a door for others: what
installed packages bring, by entry points (docs/extending.md).

`docs/decisions/0026-houses.md` says why. `lazy_loader` reads the stub, and what it lacks is an error that says what
happened. A module that fails with an AttributeError, as one does whose package is too old, would have Python say
"cannot import name 'Store' from 'sgl_kvfetch.stores'": a ``from ... import`` takes the error of a module's
``__getattr__`` for the news that it has no such name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

import lazy_loader

from sgl_kvfetch.errors import ConfigError


def open_door(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package: the names in the stub beside its ``file``.

    ``__getattr__`` raises ImportError, with the cause in its text, for a name whose module cannot be imported.
    """
    import_name, names, exported = lazy_loader.attach_stub(package, file)

    def get(name: str) -> Any:
        if name not in exported:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return import_name(name)
        except AttributeError as error:
            raise ImportError(f"{package}.{name} cannot be imported: {error}", name=package) from error

    return get, names, exported


Group = Literal["stores", "codecs", "quantisers"]
GROUPS = get_args(Group)


@cache
def brought_by_others(group: Group) -> dict[str, list[EntryPoint]]:
    """Return the entry points of the group ``sgl_kvfetch.<group>``, by name: what installed packages bring."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"sgl_kvfetch.{group}"):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def load_brought(group: Group, name: str) -> Any:
    """Return what the entry point of this name loads. Raises ConfigError, which names its package."""
    first, *others = brought_by_others(group)[name]
    if others:
        packages = ", ".join(_package(point) for point in (first, *others))
        raise ConfigError(f"{name!r} is in the entry points sgl_kvfetch.{group} of {packages}; expected one package")
    try:
        return first.load()
    except Exception as e:  # whatever another's module raises
        raise ConfigError(f"{label_of(group, name)} cannot be imported: {type(e).__name__}: {e}") from e


def label_of(group: Group, name: str) -> str:
    """Name an entry point in messages."""
    point = brought_by_others(group)[name][0]
    return f"entry point {name} = {point.value} in sgl_kvfetch.{group}, of {_package(point)}"


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def require_made(group: Group, name: str, made: object, kind: type) -> None:
    """Raise ConfigError unless an entry point made one of ``kind``, an abstract class, saying what it lacks."""
    if not isinstance(made, kind):
        lacking = sorted(each for each in getattr(kind, "__abstractmethods__", ()) if not hasattr(made, each))
        lacks = f" It lacks {', '.join(lacking)}" if lacking else ""
        raise ConfigError(
            f"{label_of(group, name)}: expected a subclass of {kind.__module__}.{kind.__name__}, found "
            f"{type(made).__name__}.{lacks}"
        )
