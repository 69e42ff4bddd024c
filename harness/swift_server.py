"""Runs OpenStack Swift with its S3 layer as a child process on a free loopback port."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.children import start_child
from harness.engine import free_port
from harness.s3_server import ACCESS_KEY, SECRET_KEY, make_bucket, s3_config, wait_until_it_answers

HAS_SWIFT = importlib.util.find_spec("swift") is not None
SWIFT_MISSING = "needs the package swift (one of the extra dev)"


class SwiftProcess:
    """A context manager; when it is entered, the server answers and has an empty bucket."""

    def __init__(self) -> None:
        self._port = free_port()
        self.config = s3_config(f"http://127.0.0.1:{self._port}")
        self._folder = tempfile.TemporaryDirectory(prefix="swift-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _start(self) -> None:
        assert HAS_SWIFT, SWIFT_MISSING
        log_path = Path(self._folder.name, "log")
        args = [self._folder.name, str(self._port), ACCESS_KEY, SECRET_KEY]
        with log_path.open("wb") as log:
            self._process = start_child(
                [sys.executable, "-m", "harness.swift_app", *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if not wait_until_it_answers(f"{self.config['endpoint']}/info", self._process):
            raise RuntimeError(f"Swift did not start:\n{log_path.read_text(errors='replace')}")
        make_bucket(self.config)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._folder.cleanup()
