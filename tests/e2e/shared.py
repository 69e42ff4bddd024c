"""Servers that tests share, one after the other: a start takes longer than most of what tests ask of a server.

A test attaches the store and the config that it needs, as an operator does at run time, and detaches them at its end.
Starts with our flags on the command line have tests of their own: test_round_trip.py, test_device_mode.py and others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.attaching import attach, detach
from harness.engine import SGLangServer, free_port


class SharedServer(SGLangServer):
    """A server whose counters start at 0 whenever a test attaches a store."""

    def __init__(self, model: Path, extra_args: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(model, extra_args=extra_args, env=env, admin_api_key="admin")
        self._before: dict[str, float] = {}

    def metrics(self) -> str:
        lines = super().metrics().splitlines(keepends=True)
        return "".join(self._less_before(line) if _COUNTER.match(line) else line for line in lines)

    def _less_before(self, line: str) -> str:
        name, _, value = line.rpartition(" ")
        return f"{name} {float(value) - self._before.get(name, 0.0)}\n"

    def count_from_here(self) -> None:
        counters = filter(_COUNTER.match, super().metrics().splitlines())
        self._before = {name: float(value) for name, _, value in (line.rpartition(" ") for line in counters)}


_COUNTER = re.compile(r"sgl_kvfetch_\w+_total\W")


class Shared:
    """One server, started when the first test needs it. After a failure the next test gets a new one."""

    def __init__(
        self,
        model: Path,
        extra_args: Sequence[str],
        policy: str | None,
        env: Mapping[str, str] | None = None,
        *,
        publishes: bool = False,
    ) -> None:
        """``policy``: SGLang's prefetch policy, unless a test sets another one. ``env``: of the server. ``publishes``:
        whether it publishes KV events, to `events_url`."""
        self.events_url = f"tcp://127.0.0.1:{free_port()}"
        events = {"publisher": "zmq", "endpoint": self.events_url, "bind": True}
        self._extra_args = [*extra_args, *(("--kv-events-config", json.dumps(events)) if publishes else ())]
        self._model, self._policy, self._env = model, policy, env or {}
        self._server: SharedServer | None = None

    @contextmanager
    def attached(self, store_url: str, *, policy: str | None = None, **config: Any) -> Iterator[SharedServer]:
        """The server with a store and a config until the block ends. Its caches are empty."""
        with self.detached() as server:
            attach(server, store_url, policy=policy or self._policy, **config)
            server.count_from_here()
            yield server
            server.flush()
            detach(server)

    @contextmanager
    def detached(self) -> Iterator[SharedServer]:
        """The server without a store. If the block attaches one, it must detach it."""
        try:
            self._running().flush()
            yield self._running()
        except BaseException:
            self.close()
            raise

    def _running(self) -> SharedServer:
        if self._server is None:
            server = SharedServer(self._model, self._extra_args, self._env)
            server.start()
            if "--hicache-storage-backend" in self._extra_args:  # without it, there is no device mode
                detach(server)
            self._server = server
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None
