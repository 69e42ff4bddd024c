from __future__ import annotations

import subprocess
import sys

import pytest

_FREES_EVERY_OTHER_BLOCK = """
import ctypes, sys
from sgl_kvfetch.processes import map_blocks_of
if sys.argv[1] == "mapped":
    map_blocks_of(1 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(24 << 20))  # from now on, glibc takes smaller blocks from its heap
blocks = [libc.malloc(4 << 20) for _ in range(32)]
for block in blocks:
    ctypes.memset(block, 1, 4 << 20)
for block in blocks[::2]:
    libc.free(block)
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_freed_blocks_go_back_to_the_kernel() -> None:
    def resident(how: str) -> int:
        command = [sys.executable, "-c", _FREES_EVERY_OTHER_BLOCK, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert resident("kept") - resident("mapped") > 15 * (4 << 10)
