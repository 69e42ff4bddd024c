"""Run ``kvfetch serve`` as a child process: a real store over a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.engine import free_port

_START_S = 30.0
_EXIT_S = 10.0


class StoreProcess:
    """A context manager that serves ``directory`` as a store on a free loopback port, ready when entered."""

    def __init__(
        self, directory: str | os.PathLike[str], *, port: int | None = None, extra_args: Sequence[str] = ()
    ) -> None:
        self.directory = Path(directory)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._args = [str(self.directory), "--port", str(self.port), *extra_args]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def start(self) -> None:
        """Start the store and wait until it answers. Raises RuntimeError, with its log, if it does not start."""
        assert self._process is None, "already started"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgl_kvfetch.cli", "serve", *self._args],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/healthz", timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        self.stop()
        raise RuntimeError(f"the store did not start: {said}")

    def kill(self) -> None:
        """Kill the store, as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """Stop the store gracefully, or kill it if that takes too long. Do nothing if it is not running."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
