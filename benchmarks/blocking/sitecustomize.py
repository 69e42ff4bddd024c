"""Makes SGLang's scheduler wait for each fetch of device mode: the baseline `blocking` of benchmarks.interference.

Python runs this file at the start of every process with this folder in PYTHONPATH, so the product needs no switch.
"""

import importlib.abc
import importlib.util
import sys
import time

_TARGET = "sgl_kvfetch.plugin.device.cache"


class _Patch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as other finders would, and changes it after it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        cache = module.KVFetchRadixCache
        step = cache.step

        def wait(self, *args):
            step(self, *args)
            # Fetched requests must be admitted before others can get their slots.
            while self._parts is not None and self._parts.board.num_open and not self._parts.fetches._landed:
                time.sleep(0.0005)
                step(self, *args)

        cache.step = wait


sys.meta_path.insert(0, _Patch())
