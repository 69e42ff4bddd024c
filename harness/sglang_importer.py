"""Imports SGLang, and forks processes that need it. A script, which `harness/imported_sglang.py` starts and talks to.

It runs with what SGLang's own processes find on their path, so it imports nothing of this project.

A server's data plane starts with a second of imports, where it finds torch imported. So it is forked as well, from a
process that each server has for that (`_fork_data_planes`). It finds what a new process would: the event loop and the
loggers that SGLang changes when it is imported are Python's own again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

_MOST_FDS = 253  # of a message, in Linux
_DATA_PLANE = [sys.executable, "-P", "-m", "sgl_kvfetch.plane"]


class ForkedProcess:
    """A process that was forked, with the methods of ``subprocess.Popen`` that its callers use."""

    def __init__(self, status: int, command: Sequence[str], note_s: Callable[[float], None] = lambda _: None) -> None:
        """``status``: where `_fork_watched` writes. ``note_s`` is called with the process's CPU seconds at its end."""
        self.pid: int = forkserver.read_signed(status)
        self._status, self._command, self._note_s = status, command, note_s
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
            self._note_s(forkserver.read_signed(self._status) / 1e6)
            os.close(self._status)
        return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _has_ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout_s)[0])


def main(number: int) -> list[str]:
    """Fork a process for each message from a socket. Return only in the forks, with a command line for Python."""
    given = set(os.environ)
    # The modules that a server imports before and after it reads its arguments.
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401

    setproctitle.getproctitle()  # the first call finds the title in memory, which a fork cannot
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    assert "prometheus_client" not in sys.modules, "at import it reads in which folder SGLang's processes share metrics"
    added = {name: value for name, value in os.environ.items() if name not in given}  # such as folders of caches
    # Each fork waits for one of its own, and reports its CPU time. With SIGCHLD ignored, nobody needs to wait for the
    # forks, and the kernel does not count the time a second time, for this process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    request, (stdout, stderr, status) = _fork_for_each_message(socket.socket(fileno=number))
    _fork_watched(status, stdout, stderr)
    os.setsid()
    for fd, standard in (stdout, 1), (stderr, 2):
        os.dup2(fd, standard)
        os.close(fd)
    command = _settle(request, added)
    return _fork_data_planes() or command


def _fork_for_each_message(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each message from a socket, until its other end is closed. Return in the forks, with the
    message and its file descriptors."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, _MOST_FDS)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return json.loads(message), fds
        for fd in fds:
            os.close(fd)


def _fork_watched(status: int, *others: int) -> None:
    """Fork once more, and return in the new process. This process writes the new one's ID, exit code and CPU time in
    microseconds to ``status``, and ends. ``others``: file descriptors of the new process alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        for fd in others:
            os.close(fd)
        forkserver.write_signed(status, pid)
        _, ended, used = os.wait4(pid, 0)
        forkserver.write_signed(status, os.waitstatus_to_exitcode(ended))
        forkserver.write_signed(status, round(1e6 * (used.ru_utime + used.ru_stime)))
        os._exit(0)
    os.close(status)


def _settle(request: dict[str, Any], added: dict[str, str]) -> list[str]:
    """Take the folder and the environment that a message names. Return its command line."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(added | request["environment"])
    command: list[str] = request["command"]
    return command


def _fork_data_planes() -> list[str]:
    """Let this process start data planes by forking them from a child of its own. Return an empty list; in the data
    planes, their command lines."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
                if list(args[:4]) == _DATA_PLANE:
                    return _request_data_plane(ours, args, options["pass_fds"])
                return super().__new__(cls)

        subprocess.Popen = Popen  # type: ignore[misc]
        return []
    ours.close()
    request, (*passed, status) = _fork_for_each_message(theirs)
    _fork_watched(status, *passed)
    _place(passed, request["fds"])
    asyncio.set_event_loop_policy(None)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    command = _settle(request, {})
    import setproctitle

    setproctitle.setproctitle(" ".join(["forked", *command]))
    return command


def _request_data_plane(requests: socket.socket, command: Sequence[str], fds: Sequence[int]) -> ForkedProcess:
    status, theirs = os.pipe()
    request = {"command": command[2:], "folder": os.getcwd(), "environment": dict(os.environ), "fds": fds}
    socket.send_fds(requests, [json.dumps(request).encode()], [*fds, theirs])
    os.close(theirs)
    return ForkedProcess(status, command)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give file descriptors the numbers that they have in the process that has sent them."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*fds, *numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    option, code, *arguments = main(int(sys.argv[1]))
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(code, {"__name__": "__main__"})
