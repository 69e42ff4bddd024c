"""Starting a data plane: as a process beside the engine, or on a thread of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from sgl_kvfetch.dataplane.arena import Arena


@dataclass(frozen=True)
class Line:
    """What a data plane is started with: its end of the line, the memory that it puts values into for the engine, and
    the memory that the engine puts pages into for it."""

    sock: socket.socket
    values: Arena
    pages: Arena


class Running(Protocol):
    """A data plane that was started."""

    def kill(self) -> None:
        """Have it end at once, whatever it does."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end. Whether it has ended."""


Launch = Callable[[Line], Running]


class DataPlaneProcess:
    """A process of its own. It ends when the engine's process does, however that ends: the line is cut then."""

    def __init__(self, line: Line) -> None:
        fds = line.sock.fileno(), line.values.fd, line.pages.fd
        numbers = map(str, (*fds, line.values.num_bytes, line.pages.num_bytes))
        command = [sys.executable, "-m", "sgl_kvfetch.dataplane", *numbers]
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        line.sock.close()

    def kill(self) -> None:
        self.process.kill()

    def join(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            return True
        return False


class DataPlaneThread:
    """A thread of this process, with an event loop: for what must be where the engine is, a GPU's video engines say."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._run, name="kvfetch", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()
