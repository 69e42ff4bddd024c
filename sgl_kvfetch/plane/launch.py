"""Starts a data plane: as a process beside the engine, or on a thread of the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sgl_kvfetch.plane.arena import Arena
from sgl_kvfetch.plane.fetch.sink import Destination


@dataclass(frozen=True)
class Line:
    """A data plane's connection to the engine: its ends of the two sockets of `Channel`, shared memory for the values
    that it sends, and shared memory for the pages that it receives. ``destination`` returns where a fetch's pages go,
    for a data plane in the engine's process, which writes there itself; None if the fetch has ended."""

    commands: socket.socket
    events: socket.socket
    values: Arena
    pages: Arena
    destination: Callable[[int], Destination | None] = lambda work: None


class Running(Protocol):
    """A data plane that was started."""

    def kill(self) -> None:
        """End it at once, whatever it is doing."""

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for its end. Return whether it has ended."""

    def is_busy(self) -> bool:
        """Return whether its event loop has run, or waited for a core or a disk, since the last call."""


Launch = Callable[[Line], Running]


class _Activity:
    """Whether a thread does anything, from what Linux says of it."""

    def __init__(self, pid: int, thread: int) -> None:
        self._folder = Path(f"/proc/{pid}/task/{thread}")
        self._times = ""

    def since_last(self) -> bool:
        try:
            times = (self._folder / "schedstat").read_text()  # how long it ran, and how long it waited for a core
            state = (self._folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        before, self._times = self._times, times
        return times != before or state in "RD"


class DataPlaneProcess:
    """A separate process. When the engine's process ends, however it ends, the socket closes, and this ends too."""

    module = "-m", "sgl_kvfetch.plane"

    def __init__(self, line: Line) -> None:
        fds = line.commands.fileno(), line.events.fileno(), line.values.fd, line.pages.fd
        numbers = map(str, (*fds, line.values.num_bytes, line.pages.num_bytes))
        # -P: the installed package, and not a folder of this name where SGLang was started, such as a checkout.
        command = [sys.executable, "-P", *self.module, *numbers]
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        self._activity = _Activity(self.process.pid, self.process.pid)
        line.commands.close()
        line.events.close()

    def kill(self) -> None:
        self.process.kill()

    def is_busy(self) -> bool:
        return self._activity.since_last()

    def join(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
                # Remove its gauges from SGLang's metrics: a killed process cannot set its queues to empty. Imported
                # only after SGLang has set the folder: the client decides at import what it writes to.
                from prometheus_client.multiprocess import mark_process_dead

                with contextlib.suppress(FileNotFoundError):  # another thread that joins removes them, too
                    mark_process_dead(self.process.pid)  # type: ignore[no-untyped-call]
            return True
        return False


class DataPlaneThread:
    """A thread of the engine's process, with an event loop, for work that must run there, such as decoding on NVDEC."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        # As in a process of its own. In SGLang's, asyncio may make loops of uvloop: its entry points ask for them.
        self._loop = asyncio.SelectorEventLoop()
        self._task: asyncio.Task[None] = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._run, name="kvfetch", daemon=True)
        self._thread.start()
        self._activity = _Activity(os.getpid(), self._thread.native_id or 0)

    def kill(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def is_busy(self) -> bool:
        return self._activity.since_last()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()
