"""Runs code that a model wrote: in a process of its own, without network, with bounds on what it may use."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile

from harness.children import end_children_on_signals

_CPU_S = 5
_WALL_S = 120  # only for what waits: the machine may be busy
_MEMORY_BYTES = 512 << 20
# Runs in the child. Limits come first, and cannot be raised again. Files can be read, and none written.
_CHILD = f"""
import ctypes, os, resource, sys
code = sys.stdin.read()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000) and libc.unshare(0x10000000 | 0x40000000):  # CLONE_NEWNET, with CLONE_NEWUSER
    sys.exit("no network namespace: " + os.strerror(ctypes.get_errno()))
for what, most in (
    (resource.RLIMIT_CPU, {_CPU_S}), (resource.RLIMIT_AS, {_MEMORY_BYTES}), (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(what, (most, most))
sys.stdout = open(os.devnull, "w")  # what an answer prints is of no interest
exec(compile(code, "answer", "exec"), {{"__name__": "__main__"}})
"""


def passes(code: str, tests: str) -> bool:
    """Return whether ``code`` runs and ``tests`` pass after it. An answer that exits early does not pass.

    Raises OSError where the system gives no network namespace: the code does not run then.
    """
    end_children_on_signals()
    done = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = child.communicate(f"{code}\n{tests}\nimport os\nos.write(1, {done.encode()!r})", timeout=_WALL_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    if "no network namespace" in err and child.returncode == 1:
        raise OSError(err.strip())
    return child.returncode == 0 and out == done
