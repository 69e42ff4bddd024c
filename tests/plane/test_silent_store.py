"""A data plane whose store accepts connections, and is silent in the TLS handshake: one dead backend of a balancer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable
from pathlib import Path

import pytest
import trustme

from harness.faults import Fault, FaultyProxy
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until, wait_until
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.protocol.arena import StagedValues
from tests.engine.test_data_plane import Launcher, all_of, open_plane, store
from tests.segments import page_hashes

pytestmark = pytest.mark.process
NUM_PAGES = 8


def fetched(plane: DataPlane, mode: str, hashes: list[bytes], timeout_s: float) -> int:
    if mode == "host":
        return plane.fetch(all_of(hashes, timeout_s)).over.result(WAIT_S).num_pages
    got: list[StagedValues] = []
    work = plane.stage(hashes, got.append)

    def is_there() -> bool:
        plane.step()
        return bool(got)

    wait_until(is_there)
    plane.unstage(work)
    return got[0].num_pages


@pytest.mark.parametrize("mode", ["host", "device"])
async def test_a_fetch_is_answered_and_the_next_one_is_well(tmp_path: Path, mode: str) -> None:
    authority, context, ca = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("127.0.0.1").configure_cert(context)
    launcher, hashes = Launcher(), page_hashes(NUM_PAGES, mode)
    settings = {"tls": {"ca_file": str(ca)}, "fetch_timeout_s": 2, "lookup_timeout_s": 5}
    staging_bytes = 64 << 20 if mode == "device" else 0

    def bring(timeout_s: float) -> Awaitable[int]:
        return asyncio.to_thread(fetched, plane, mode, hashes, timeout_s)

    async def is_well() -> bool:
        return await bring(WAIT_S) == NUM_PAGES

    with StoreProcess(tmp_path / "store") as process:
        async with FaultyProxy("127.0.0.1", process.port, context) as link:
            plane = await asyncio.to_thread(open_plane, link.url, launcher, staging_bytes=staging_bytes, **settings)
            try:
                await link.set(Fault("hang", only=lambda method, path: (method, path[-4:]) == ("GET", ".kvd")))
                await asyncio.to_thread(store, plane, hashes)
                await link.set(Fault("silent"))  # to reads, but for one that begins as soon as the pages are found
                assert await bring(2.0) == 0
                await link.set(None)
                await until(is_well)  # the store was left alone for a second
            finally:
                await asyncio.to_thread(plane.close)
                assert all([await asyncio.to_thread(each.join, WAIT_S) for each in launcher.started])
