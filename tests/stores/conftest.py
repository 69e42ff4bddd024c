from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sgl_kvfetch.server import RunningServer, ServerConfig, running_server
from sgl_kvfetch.testing.faults import FaultyProxy


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with running_server(ServerConfig(tmp_path / "served", port=0, grace_s=1)) as server:
        yield server


@pytest.fixture
async def proxy(server: RunningServer) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(server.host, server.port) as proxy:
        yield proxy
