"""Change SGLang's process for a baseline of benchmarks.interference. KVFETCH_PATCH names the baseline.

* blocking: the scheduler waits for each fetch of device mode.
* threads: the data plane runs on threads of SGLang's process and writes into the pool itself.

Python runs this at the start of every process that has this folder in PYTHONPATH, so the product needs no such switch.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _block(module: Any) -> None:
    cache = module.KVFetchRadixCache
    step = cache.step

    def wait(self: Any, *args: Any) -> None:
        step(self, *args)
        # Landed prefixes must be admitted before other fetches can have their slots.
        while self._parts is not None and self._parts.board.num_open and not self._parts.fetches._landed:
            time.sleep(0.0005)
            step(self, *args)

    cache.step = wait


def _stay_in_process(module: Any) -> None:
    module.FramePool = object  # a pool of this kind keeps the data plane in the process


_PATCHES = {
    "blocking": ("sgl_kvfetch.plugin.device.cache", _block),
    "threads": ("sgl_kvfetch.plugin.data_plane", _stay_in_process),
}
_TARGET, _PATCH = _PATCHES[os.environ["KVFETCH_PATCH"]]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find one module like the other finders do, and patch it after it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _PATCH(module)


sys.meta_path.insert(0, _Finder())
