"""Servers that treat the CPU engine's pools as those of a GPU, and compare what they load with what they wrote."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

logger = logging.getLogger("sgl_kvfetch")  # of which SGLang's servers write lines

RESTORED = "a kernel restores cells that were coded"  # in the server's log
_SAID = "kvfetch: of %d pages that were loaded, %d have the bits that were written"
_COMPARED = re.compile(_SAID.replace("%d", r"(\d+)"))
_CUSTOMIZE = """
import importlib.util, sys

RESTORES = {restores}


class PatchedPages:
    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kvfetch.plugin.device.pools":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), setattr(module, "open_gpu", open_gpu))
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
        from harness.stand_in_gpu import compare_loads

        compare_loads()
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


def pages_compared(log: str) -> tuple[int, int]:
    """Return how many loaded pages a server has compared, and how many of them have the bits that were written."""
    found = [tuple(map(int, each.groups())) for each in _COMPARED.finditer(log)]
    return sum(each[0] for each in found), sum(each[1] for each in found)


def compare_loads() -> None:
    """Let this server compare each page that it has loaded, as it lies in the pool, with what it has read out of the
    pool under the same hash, and log how many are the same."""
    from sgl_kvfetch.engine.process import Peer
    from sgl_kvfetch.keys import hash_bytes, split_hashes
    from sgl_kvfetch.plugin.device import linker as device
    from sgl_kvfetch.protocol.arena import pages_in
    from sgl_kvfetch.types import TENSORS

    written: dict[bytes, bytes] = {}
    right_write, right_load = Peer.write, device.KVFetchLinker.load

    def write(peer: Peer, command: Any, pool_pages: Any, read: Any, *others: Any) -> bool:
        def read_and_note(pages: Sequence[int], memory: torch.Tensor, offset: int) -> bool:
            is_there: bool = read(pages, memory, offset)
            if is_there:
                found = pages_in(memory[offset:], peer.setup.geometry, len(pages))
                by_page = zip(*(x.transpose(1, 2) for x in found), strict=True)
                written.update(zip(split_hashes(command.hashes), map(_digest, by_page), strict=True))
            return is_there

        return right_write(peer, command, pool_pages, read_and_note, *others)

    def load(linker: Any, rid: str, transfers: Any) -> bool:
        is_loaded = right_load(linker, rid, transfers)
        this, hashes = linker._loads[rid], hash_bytes(device._kv(transfers).keys)

        def compare(is_sound: bool) -> None:
            buffers, num_same = [linker._pages._buffers[tensor] for tensor in TENSORS], 0
            for page_hash, slots in zip(hashes, this.slots.view(len(hashes), -1), strict=True):
                found = _digest([torch.stack([x[slots] for x in layers]) for layers in buffers])
                num_same += found == written.get(page_hash)
            logger.warning(_SAID, len(hashes), num_same)
            this.on_end(is_sound)

        linker._loads[rid] = replace(this, on_end=compare)
        return is_loaded

    for kind, name, ours in ((Peer, "write", write), (device.KVFetchLinker, "load", load)):
        setattr(kind, name, ours)


def _digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a checksum of a page's K and V, ``(layers, page_size, heads, dim)`` each."""
    return xxhash.xxh3_128_digest(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors))
