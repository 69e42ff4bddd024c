"""Makes the driver's video libraries loadable for the steps, where the machine hides or lacks them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_DECODE, _ENCODE = "libnvcuvid.so.1", "libnvidia-encode.so.1"
_MOUNT = Path("/usr/local/nvidia")  # where containers often have the driver
# PyNvVideoCodec cannot be imported without the encoder's library, not even to decode. Some machines whose GPU has no
# encoder lack it. The stub supports version 13.0 of the interface, and finds no encoder.
_STUB = """
int NvEncodeAPIGetMaxSupportedVersion(unsigned *version) { *version = 13 << 4; return 0; }
int NvEncodeAPICreateInstance(void *functions) { return 1; }
"""


def complete(folder: Path) -> list[str]:
    """Put what cannot be loaded into ``folder``, and the folder on the LD_LIBRARY_PATH of processes started from now
    on. Return a sentence for each library that was missing."""
    folder.mkdir()
    notes = [_provide(name, folder) for name in (_DECODE, _ENCODE) if not _loads(name)]
    if any(folder.iterdir()):
        others = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)
    return notes


def _provide(name: str, folder: Path) -> str:
    for path in _candidates(name):
        if _loads(str(path)):
            (folder / name).symlink_to(path)
            return f"{name} is not on the library path: taken from {path.parent}"
    if name != _ENCODE:
        return f"{name} is missing: install the driver's video libraries"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(folder / name)]
    try:
        subprocess.run(command, input=_STUB, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        return f"{name} is missing, and no stub could be made ({e}): install gcc, or the driver's video libraries"
    return f"{name} is missing: a stub without an encoder stands in for it"


def _candidates(name: str) -> Iterator[Path]:
    pattern = name.removesuffix("1") + "*"
    if _loads("libcuda.so.1"):
        loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
        for path in sorted({Path(each).parent for each in loaded if "/libcuda.so" in each}):
            yield from path.glob(pattern)
    yield from _MOUNT.rglob(pattern)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
