"""Starts processes that need SGLang without importing it in each: they are forked from one that has imported it.

Three quarters of the CPU time that a server takes to start are imports. What it does after them is the same, with one
difference: plugins are loaded after `sglang.srt.entrypoints.http_server` was imported, and not before. In a server's
schedulers that is so anyway.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Self

from harness.children import note_s, start_child
from harness.waiting import WAIT_S

_SCRIPT = Path(__file__).with_name("sglang_importer.py")
# Environment variables that nothing reads before SGLang has read its arguments. So forks may have values of their own.
_READ_LATE = {
    *("KVFETCH_SGLANG", "MOONCAKE_PROTOCOL", "PYTEST_CURRENT_TEST", "XDG_CACHE_HOME"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_MAMBA_CONV_DTYPE"),
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
}


def common_environment() -> dict[str, str]:
    """Return this process's environment, changed so that Python does not import from its working folder, and writes
    logs at once."""
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


class ForkedProcess:
    """A process with the methods of ``subprocess.Popen`` that the harness uses."""

    def __init__(self, status: int, command: Sequence[str]) -> None:
        self.pid: int = forkserver.read_signed(status)
        self._status, self._command = status, command
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.wait() if self._code is not None or self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises ``subprocess.TimeoutExpired``."""
        if self._code is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            self._code = int(forkserver.read_signed(self._status))
            note_s(forkserver.read_signed(self._status) / 1e6)
            os.close(self._status)
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _has_ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout_s)[0])


class ImportedSGLang:
    """A process that has imported SGLang, from when one is first needed. A context manager."""

    def __init__(self) -> None:
        self._importer: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-imported-")
        self._log = Path(self._folder.name, "log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._folder.cleanup()

    def start(
        self,
        command: Sequence[str],
        folder: str | os.PathLike[str],
        common: Mapping[str, str],
        own: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> ForkedProcess | None:
        """Start ``python`` with a command line, ``-m`` or ``-c`` first, in a session of its own. Its environment is
        ``common``, updated with ``own``. If ``common`` changes, SGLang is imported again. Return None if the process
        must import SGLang itself, because importing may read a variable in ``own``."""
        early = {name: value for name, value in common.items() if name not in _READ_LATE}
        if any(name not in _READ_LATE and early.get(name) != value for name, value in own.items()):
            return None
        if self._importer is None or self._importer.poll() is not None or early != self._environment:
            self._end()
            self._begin(early)
        assert self._requests is not None
        status, theirs = os.pipe()
        request = {"command": list(command), "folder": os.fspath(folder), "environment": {**common, **own}}
        socket.send_fds(self._requests, [json.dumps(request).encode()], [stdout.fileno(), stderr.fileno(), theirs])
        os.close(theirs)
        try:
            return ForkedProcess(status, command)
        except EOFError:
            raise RuntimeError(f"SGLang cannot be imported:\n{self._log.read_text()}") from None

    def run(self, command: Sequence[str], folder: Path, **own: str) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with a command line to its end, with output to two files in a folder. Its environment is
        `common_environment`, updated with ``own``."""
        paths = folder / "stdout", folder / "stderr"
        with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
            process = self.start(command, folder, common_environment(), own, stdout, stderr)
        assert process is not None, f"SGLang reads one of {list(own)} while it is imported"
        return subprocess.CompletedProcess(command, process.wait(WAIT_S), *(path.read_text() for path in paths))

    def _begin(self, environment: dict[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("wb") as log:
            self._importer = start_child(
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno())],
                cwd=self._folder.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._environment = environment

    def _end(self) -> None:
        if self._importer is not None:
            assert self._requests is not None
            self._requests.close()
            self._importer.wait()
