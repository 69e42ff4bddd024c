"""Run ``kvfetch serve`` as a child process: a real store over a real socket."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from harness.children import start_child
from harness.engine import free_port
from harness.waiting import WAIT_S, polls

_EXIT_S = 10.0


class StoreProcess:
    """A context manager that serves ``directory`` as a store on a free loopback port, ready when entered."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        port: int | None = None,
        extra_args: Sequence[str] = (),
        ca_file: Path | None = None,
        link_gbps: float | None = None,
        command: Sequence[str] = (),
        config: Mapping[str, float] | None = None,
    ) -> None:
        """``ca_file``: the CA of the certificate in ``extra_args``, if the store is to speak TLS. ``link_gbps``: put
        the store behind a `SlowLink` of this speed. ``command``: how to run ``kvfetch``; by default this Python runs
        it. ``config``: fields of `ServerConfig` that the command line does not have."""
        module = ["sgl_kvfetch.tools"] if link_gbps is None else ["harness.slow_link", f"{link_gbps:.6f}"]
        if config is not None:
            module = ["harness.serve_with", json.dumps(config)]
        command = command or (sys.executable, "-X", "faulthandler", "-m", *module)
        self.directory = Path(directory)
        self.port = port or free_port()
        self._tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self.url = f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"
        self._args = [*command, "serve", str(self.directory), "--port", str(self.port), *extra_args]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if not isinstance(error, KeyboardInterrupt):  # then all children were killed
                self.require_running()
        finally:
            self.stop()
            self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start the store and wait until it answers.

        Raises RuntimeError, with its log, if it does not: with its threads' stacks, too, if it hangs.
        """
        assert self._process is None, "already started"
        files = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        self._process = start_child(self._args, **files)
        last_error: OSError | None = None
        for _ in polls(poll_s=0.05):
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5, context=self._tls).close()
                return
            except OSError as e:
                last_error = e
        process, self._process = self._process, None
        hangs = process.poll() is None
        if hangs:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        said = self.log()
        self._log.close()
        how = f"no answer in {WAIT_S:g} s, {last_error}" if hangs else f"it ended with code {process.returncode}"
        raise RuntimeError(f"the store did not start: {how}\n{said}")

    def log(self) -> str:
        """Return all that the store has printed so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """Kill the store, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Stop the store gracefully by a signal, or kill it if that takes too long. Return its exit code, or None if it
        was not running."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            return process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def require_running(self) -> None:
        """Raise RuntimeError, with its log, if the started process has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RuntimeError(f"the store ended by itself with code {code}:\n{self.log()[-4000:]}")
