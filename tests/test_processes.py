"""The memory of processes, as Linux tells it and takes it back, how processes end that have used obstore, and how
OpenMP's threads wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sgl_kvfetch.processes import available_bytes, use_one_thread

_FREES_EVERY_OTHER_BLOCK = """
import ctypes, sys
from sgl_kvfetch.processes import map_large_blocks
if sys.argv[1] == "mapped":
    map_large_blocks()
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


@pytest.mark.process
def test_freed_blocks_go_back_to_the_kernel() -> None:
    def resident(how: str) -> int:
        command = [sys.executable, "-c", _FREES_EVERY_OTHER_BLOCK, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert resident("kept") - resident("mapped") > 15 * (4 << 10)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8000 * 1024), (str(1 << 40), 8000 * 1024), ("5000000", 5000000 - 4000000 + 300000)]
)
def test_memory_is_limited_by_the_machine_and_by_the_container(tmp_path: Path, limit: str, expected: int) -> None:
    group = tmp_path / "sys/fs/cgroup/pod"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Free: 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    assert available_bytes(tmp_path) == 8000 * 1024  # no limits here
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 3700000\ninactive_file 300000\n")
    assert available_bytes(tmp_path) == expected


# What Python does at its end, in this order, and what it must not get to where obstore's threads may still run.
_LAST = """
import sys
class Last:
    def __del__(self, write=sys.stdout.write, flush=sys.stdout.flush):
        write("taken apart\\n")
        flush()
sys.last = Last()
"""
_ENDS = f"""{_LAST}
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from sgl_kvfetch.processes import run_and_end
if sys.argv[1] == "obstore":
    import obstore
atexit.register(print, "atexit")
go = threading.Event()
def main():
    ThreadPoolExecutor().submit(lambda: (go.wait(), print("thread")))
    print("main")
    threading.Timer(0.2, go.set).start()
    exec(sys.argv[2])
run_and_end(main)
print("returned")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('what is wrong')", 1, "what is wrong"),
        ("raise ValueError('ours')", 1, "ValueError: ours"),
    ],
)
def test_a_process_that_has_used_obstore_ends_as_python_would_but_takes_nothing_apart(
    end: str, code: int, stderr: str
) -> None:
    for used in ("obstore", "nothing"):
        done = subprocess.run([sys.executable, "-c", _ENDS, used, end], capture_output=True, text=True, timeout=120)
        assert done.returncode == code
        assert done.stderr.strip().endswith(stderr)
        assert bool(done.stderr) == bool(stderr)
        returned = ["returned"] if used == "nothing" and not end else []
        taken_apart = ["taken apart"] if used == "nothing" else []
        assert done.stdout.split("\n")[:-1] == ["main", *returned, "thread", "atexit", *taken_apart]


@pytest.mark.process
def test_commands_end_so() -> None:
    """Or one in five that has used S3 would abort."""
    script = (
        f"{_LAST}\nimport obstore\nfrom sgl_kvfetch.tools import main\nsys.argv[1:] = ['inspect', 'nowhere']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr


def test_only_the_calling_thread_computes_alone() -> None:
    own = torch.get_num_threads()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(1) as later:
        first.submit(torch.set_num_threads, 3).result()
        alone.submit(use_one_thread).result()
        assert alone.submit(torch.get_num_threads).result() == 1
        assert later.submit(torch.get_num_threads).result() == 3
        assert first.submit(torch.get_num_threads).result() == 3
        later.submit(torch.set_num_threads, own).result()
    assert torch.get_num_threads() == own


@pytest.mark.process
def test_threads_of_commands_sleep_while_they_wait() -> None:
    """On a busy machine, a calibration whose threads spin takes several times the CPU time. This holds for each command
    that imports torch; `encode` imports little else."""
    environ = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}
    environ.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "encode", "/none/such"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True).stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\w+)'", said) == ["0"], said
