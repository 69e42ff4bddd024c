"""Makes modules that are missing, and patches SGLang's as they are imported.

A module that is made has every name: a function that raises when it is called. So SGLang's modules can be imported,
which name many functions that a Llama never calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MADE = frozenset({"sgl_kernel", "av", "soundfile"})  # packages whose modules are made if they do not exist
Patch = Callable[[Any], None]  # takes the module


def note(text: str) -> None:
    """Write a line to the log of stand-ins, or to stderr."""
    line = f"[stand-in {os.getpid()}] {text}\n"
    path = os.environ.get("STANDIN_LOG")
    if path is None:
        sys.stderr.write(line)
        return
    with open(path, "a") as log:
        log.write(line)


class Missing:
    """A name of a package that is not here. Calling it raises RuntimeError."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        note(f"CALLED {self.__name__}, which has no stand-in")
        raise RuntimeError(f"{self.__name__} has no stand-in")

    def __getattr__(self, name: str) -> Missing:
        return _missing(self.__name__, name)

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


def _missing(owner: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{owner}.{name}")


class Maker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder, which makes modules."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _MADE:
            return None
        note(f"made module {name}")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _missing(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            from . import kernels

            module.__version__ = "0.4.10"  # type: ignore[attr-defined]
            for name in ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul"):
                setattr(module, name, getattr(kernels, name))
        elif module.__name__ == "sgl_kernel.utils":
            module.is_arch_support_pdl = lambda *args: False  # type: ignore[attr-defined]


class Patcher(importlib.abc.MetaPathFinder):
    """The first finder: calls a function with a module of SGLang after it was imported."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, *_: object
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch is not None else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def install() -> None:
    from .patches import PATCHES

    if not any(isinstance(finder, Patcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Patcher(PATCHES))
        sys.meta_path.append(Maker())
