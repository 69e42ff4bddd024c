"""Starts processes that need SGLang, or torch, without importing it in each: they are forked from one that has imported
it (`harness/sglang_importer.py`).

Nine tenths of the CPU time that a server takes to start are imports, its data plane's among them. What it does after
them is the same, with one difference: plugins are loaded after `sglang.srt.entrypoints.http_server` was imported, and
not before. In a server's schedulers that is so anyway.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from harness.children import start_child
from harness.sglang_importer import Forker, fork_child, fork_data_planes
from harness.waiting import WAIT_S

_SCRIPT = Path(__file__).with_name("sglang_importer.py")
# Environment variables that nothing reads before SGLang has read its arguments. So forks may have values of their own.
_READ_LATE = {
    *("KVFETCH_SGLANG", "MOONCAKE_PROTOCOL", "PYTEST_CURRENT_TEST", "XDG_CACHE_HOME"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_MAMBA_CONV_DTYPE"),
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
    *("OTEL_BSP_SCHEDULE_DELAY", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    "OTEL_TRACES_EXPORTER",
}

# What data planes import without metrics: `prometheus_client` reads at import in which folder processes share them.
_OF_DATA_PLANES = "directory.local", "protocol.quantiser", "stores.http"


def common_environment() -> dict[str, str]:
    """Return this process's environment, changed so that Python does not import from its working folder, and writes
    logs at once."""
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that another one has forked. ``options``: those of ``subprocess.Popen``."""

    def __init__(self, forker: Forker, command: Sequence[str], **options: Any) -> None:
        self._execute_child = partial(fork_child, forker, self)
        super().__init__(command, **options)


class Importer:
    """A process that has imported modules, from when one is first needed. A context manager."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._forker: Forker | None = None
        self._environment: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="imported-")
        self._log = Path(self._folder.name, "log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._folder.cleanup()

    def forker(self, environment: Mapping[str, str]) -> Forker:
        """Return what asks the process. With another environment than before, modules are imported again."""
        with self._lock:
            has_ended = self._process is not None and self._process.poll() is not None
            if self._forker is None or has_ended or environment != self._environment:
                self._end()
                self._environment = dict(environment)
                self._forker = self._begin()
            return self._forker

    def log(self) -> str:
        """Return what the process has printed: why it could not import a module."""
        return self._log.read_text()

    def _begin(self) -> Forker:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("wb") as log:
            self._process = start_child(
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno()), *self._modules],
                cwd=self._folder.name,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        return Forker(self._requests)

    def _end(self) -> None:
        if self._process is not None and self._requests is not None:
            self._requests.close()
            self._process.wait()


class ImportedSGLang(Importer):
    """A process that has imported what SGLang's server imports before and after it reads its arguments."""

    def __init__(self) -> None:
        super().__init__("sglang.launch_server", "sglang.srt.entrypoints.http_server")

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
        ``common``, updated with ``own``. Return None if the process must import SGLang itself, because importing may
        read a variable in ``own``."""
        early = {name: value for name, value in common.items() if name not in _READ_LATE}
        late = _READ_LATE | ({"PYTHONPATH"} if _customises(own) else set())
        if any(name not in late and early.get(name) != value for name, value in own.items()):
            return None
        files = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        try:
            forker = self.forker(early)
            return ForkedProcess(forker, command, cwd=folder, env={**common, **own}, start_new_session=True, **files)
        except (EOFError, OSError):
            raise RuntimeError(f"SGLang cannot be imported:\n{self.log()}") from None

    def run(self, command: Sequence[str], folder: Path, **own: str) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with a command line to its end, with output to two files in a folder. Its environment is
        `common_environment`, updated with ``own``."""
        paths = folder / "stdout", folder / "stderr"
        with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
            process = self.start(command, folder, common_environment(), own, stdout, stderr)
        assert process is not None, f"SGLang reads one of {list(own)} while it is imported"
        return subprocess.CompletedProcess(command, process.wait(WAIT_S), *(path.read_text() for path in paths))


def _customises(environment: Mapping[str, str]) -> bool:
    """Return whether a folder of PYTHONPATH is there for its ``sitecustomize.py``, which forks run, too."""
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(Path(folder, "sitecustomize.py").exists() for folder in folders)


@contextmanager
def data_planes_are_forked() -> Iterator[None]:
    """Fork the data planes that this process starts from one that has imported torch and most of what they need."""
    environment = common_environment()
    with Importer("torch", *(f"sgl_kvfetch.{name}" for name in _OF_DATA_PLANES)) as importer:
        end = fork_data_planes(lambda: importer.forker(environment))
        yield
        end()
