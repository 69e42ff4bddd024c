"""Runs nginx with one worker over a directory, on a free loopback port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.children import start_child
from harness.engine import free_port

_START_S = 10.0

_CONFIG = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
{user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000000;
    default_type application/octet-stream;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {root};
    }}
}}
"""


def find_nginx() -> str | None:
    """Return the path of nginx, or None. Debian puts it where only root's PATH leads."""
    return shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))


def nginx_version(binary: str) -> str:
    said = subprocess.run([binary, "-v"], capture_output=True, text=True, check=True).stderr
    return said.strip().rpartition("/")[2]


class NginxProcess:
    """A context manager that serves the files under ``root``. ``folder`` is for its configuration and logs."""

    def __init__(self, binary: str, root: Path, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        # A worker of another user could not read the store's files.
        user = "user root;" if os.geteuid() == 0 else ""
        (folder / "nginx.conf").write_text(_CONFIG.format(folder=folder, root=root, port=self.port, user=user))
        self._command = [binary, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]

    def __enter__(self) -> Self:
        self._process = start_child(self._command, stdin=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError(f"nginx did not start: {(self._folder / 'error.log').read_text(errors='replace')}")

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()
