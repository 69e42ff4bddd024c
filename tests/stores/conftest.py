from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from harness.ceph_server import CEPH_MISSING, HAS_CEPH, CephProcess
from harness.faults import FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server, running_s3_server
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.s3 import S3Store


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with running_server(ServerConfig(tmp_path / "served", port=0, grace_s=1)) as server:
        yield server


@pytest.fixture
async def proxy(server: RunningServer) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(server.host, server.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server) -> S3Server:
    """A server with one empty bucket."""
    s3_server.reset()
    s3_server.make_bucket()
    return s3_server


@pytest.fixture
async def s3_proxy(s3: S3Server) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(s3.host, s3.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisProcess]:
    if REDIS is None:
        pytest.skip(REDIS_MISSING)
    with RedisProcess() as server:
        yield server


@pytest.fixture
def index(redis_server: RedisProcess) -> RedisProcess:
    """An empty Redis."""
    redis_server.client.flushall()
    return redis_server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[CephProcess]:
    if not HAS_CEPH:
        pytest.skip(CEPH_MISSING)
    with CephProcess() as server:
        yield server


@pytest.fixture(params=["local", "http", "s3"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, server: RunningServer, s3: S3Server
) -> AsyncIterator[AdminStore]:
    """One of each kind that keeps things beside segments."""
    match request.param:
        case "local":
            store: AdminStore = LocalStore(tmp_path / "store")
        case "http":
            store = HttpStore(server.url)
        case _:
            store = S3Store(f"s3://{BUCKET}/kv", config=s3.config)
    yield store
    await store.close()
