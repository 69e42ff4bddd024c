"""What the soak test takes for a fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.soak.clients import Busy, Client
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.world import World
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server


class StoppingLedger(Ledger):
    """Sets ``stop`` at the first problem."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = asyncio.Event()

    def problem(self, what: str, example: str = "") -> None:
        super().problem(what, example)
        self.stop.set()


@pytest.mark.process
async def test_a_client_notices_wrong_data(tmp_path: Path) -> None:
    world, store = World(1, seed=0), LocalStore(tmp_path)
    for segment in world.segments.values():
        for version in segment.versions:
            await store.put(version.data_name, version.data)
        await store.put(segment.name, segment.versions[0].manifest)
    await store.close()
    for path in tmp_path.rglob("*.kvd"):  # noqa: ASYNC240
        path.write_bytes(b"wrong" + path.read_bytes()[5:])
    ledger = StoppingLedger()
    async with running_server(ServerConfig(tmp_path, port=0)) as server, asyncio.timeout(WAIT_S):
        await Client(0, server.port, world, ledger, Busy(), seed=0).run(ledger.stop)
    assert "differ" in ledger.problems["read: wrong"].example
