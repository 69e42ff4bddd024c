"""Every place where we touch SGLang: one table, in parts, checked against the installed version.

SGLang's plugin loader logs what goes wrong and goes on, so a seam that moved would show as a backend that is silently
not there. `register.py` installs its hooks from this table and the gate checks it before a launch: what is not in here
is not used, and a test compares the table with the imports of this package.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import types
from collections.abc import Collection
from typing import Any

from sgl_kvfetch.plugin.seams.cpu_engine import CPU_ENGINE
from sgl_kvfetch.plugin.seams.device_cache import DEVICE_CACHE
from sgl_kvfetch.plugin.seams.device_scheduler import DEVICE_SCHEDULER
from sgl_kvfetch.plugin.seams.gate import GATE
from sgl_kvfetch.plugin.seams.host import HOST
from sgl_kvfetch.plugin.seams.seam import Scope, Seam, Use
from sgl_kvfetch.plugin.seams.weights import WEIGHTS

__all__ = ["SEAMS", "SGLANG_VERSION", "Scope", "Seam", "Use", "check_seam", "check_seams", "check_version"]

SGLANG_VERSION = "0.5.23"

SEAMS: tuple[Seam, ...] = (*GATE, *WEIGHTS, *HOST, *DEVICE_SCHEDULER, *DEVICE_CACHE, *CPU_ENGINE)


def check_version() -> str | None:
    """What is wrong with the installed SGLang's version, or None."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    return None if found == SGLANG_VERSION else f"found sglang {found}, expected {SGLANG_VERSION}"


def check_seam(seam: Seam) -> str | None:
    """What is wrong with one seam (what was found and what was expected), or None. Imports the seam's module."""
    try:
        target = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path} not found ({error})"
    if seam.params is not None:
        found = tuple(inspect.signature(target).parameters) if callable(target) else None
        if found != seam.params:
            expected = f"expected ({', '.join(seam.params)})"
            return f"{seam.path}: found {_describe(found)}, {expected}"
    absent = [name for name in seam.has if name not in _members(target)]
    absent += [name for name in seam.mentions if name not in _mentioned(target)]
    return f"{seam.path}: expected {', '.join(absent)}, found none of that name" if absent else None


def check_seams(scopes: Collection[Scope] = tuple(Scope)) -> list[str]:
    """Every mismatch between the table and the installed SGLang, version first. An empty list is a pass."""
    version = check_version()
    mismatches = [] if version is None else [version]
    for seam in SEAMS:
        if seam.scope in scopes and (mismatch := check_seam(seam)) is not None:
            mismatches.append(mismatch)
    return mismatches


def _describe(params: tuple[str, ...] | None) -> str:
    return "no callable" if params is None else f"({', '.join(params)})"


def _members(target: Any) -> set[str]:
    """Attributes of a class and its fields: a field without a default is no attribute of the class."""
    fields = {name for cls in getattr(target, "__mro__", ()) for name in inspect.get_annotations(cls)}
    return fields | set(dir(target))


def _mentioned(target: Any) -> set[str]:
    """Names that the code of a function uses, nested functions included. Hooks are looked through."""
    function = inspect.unwrap(target)
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names
