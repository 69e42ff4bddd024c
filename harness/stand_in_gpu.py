"""Servers that treat the CPU engine's pools as those of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

RESTORED = "a kernel restores cells that were coded"  # in the server's log
_CUSTOMIZE = """
import importlib.util, sys

RESTORES = {restores}


class PatchedPages:
    def find_spec(self, name, path=None, target=None):
        if name != "sgl_kvfetch.plugin.device.pools":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            module.open_gpu = open_gpu

        spec.loader.exec_module = execute_and_patch
        return spec


def open_gpu(pool):
    from harness.immediate_device import ImmediateDevice

    if RESTORES:
        import logging

        from sgl_kvfetch.plugin.device import gpu_restores
        from sgl_kvfetch.triton_kernels import runtime

        runtime.INTERPRETED = False  # the reference decodes `ans`: the interpreter takes milliseconds for each row
        launch = gpu_restores.launch_exact

        def launch_and_say_it(shape, rows, *args):
            logging.getLogger("sgl_kvfetch").warning("{said}", len(rows))
            launch(shape, rows, *args)

        gpu_restores.launch_exact = launch_and_say_it
    return ImmediateDevice(), RESTORES


sys.meta_path.insert(0, PatchedPages())
"""


def on_the_gpu_path(folder: Path, *, restores: bool = False) -> dict[str, str]:
    """Return the environment of a server that treats the CPU engine's pools as those of a GPU: by streams and slots, on
    a device that does its work at once. ``restores``: whether cells of `exact` stay coded until they are there, where
    Triton's interpreter runs the kernel that restores them; else it gets values. ``folder``: for a file."""
    folder.mkdir(exist_ok=True)
    Path(folder, "sitecustomize.py").write_text(_CUSTOMIZE.format(restores=restores, said=f"kvfetch: {RESTORED}: %d"))
    found = {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])])}
    return found | {"TRITON_INTERPRET": "1"} if restores else found
