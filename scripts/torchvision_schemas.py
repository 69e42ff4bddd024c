"""Let torchvision's CUDA wheel be imported next to a CPU build of torch.

The wheel's extension cannot be loaded there. So the operators that ``torchvision/_meta_registrations.py`` requires do
not exist, and ``import torchvision`` fails (``operator torchvision::nms does not exist``). ``import sglang`` then fails
too, because it imports transformers, and through it torchvision, before it loads any plugin. So `scripts/bootstrap`
copies this module into a CPU-only environment, and calls ``install`` from a ``.pth`` file.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_libraries: list[Any] = []  # a torch.library.Library removes its operators when it is garbage collected


def declare() -> None:
    """Declare the schemas of the missing operators, so that their fake kernels can be registered.

    They have no implementation: calling one still raises. Does nothing with a CUDA build of torch, whose extension
    loads and declares them itself (twice would be an error).
    """
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _libraries.append(library)


class _DeclaringLoader(Loader):
    """Runs ``declare`` before the module that it loads."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        declare()
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeclaringLoader(spec.loader)
        return spec


def install() -> None:
    """Make ``import torchvision`` run ``declare`` first, in this process. Imports neither of the two; idempotent."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())
