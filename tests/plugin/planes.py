"""Data planes on threads of the test's process, so that tests can inspect them. Values go through shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from harness.waiting import WAIT_S, until
from sgl_kvfetch.plane.launch import DataPlaneThread, Line, Running
from sgl_kvfetch.plane.service import Service, open_alone, run_data_plane

R = TypeVar("R")


@dataclass
class Served:
    """The data planes that were started, and their event loops."""

    services: list[Service] = field(default_factory=list)
    loops: list[asyncio.AbstractEventLoop] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # those that run as long as their data plane

    def add(self, service: Service) -> None:
        """Runs on the data plane's event loop."""
        self.services.append(service)
        self.loops.append(asyncio.get_running_loop())
        self._tasks |= asyncio.all_tasks()

    def launch(self, line: Line) -> Running:
        return DataPlaneThread(run_data_plane(line, open_alone, on_service=self.add))

    @property
    def service(self) -> Service:
        """The last one."""
        return self.services[-1]

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """On the last one's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loops[-1]).result(WAIT_S)

    def write_all(self) -> None:
        """Wait until the last one has written all pages that were queued."""

        async def write_all() -> None:
            for _ in range(8):  # it reads what it was sent
                await asyncio.sleep(0)
            await self.service.client.writer.drain()

        self.run(write_all())

    def wait_until_idle(self) -> None:
        """Wait until the last one has no task left, in the background either."""

        async def idle() -> None:
            this = asyncio.current_task()
            await until(lambda: asyncio.all_tasks() <= {*self._tasks, this})

        self.run(idle())
