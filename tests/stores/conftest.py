from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.ceph_server import CEPH_MISSING, HAS_CEPH, CephProcess
from harness.faults import FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server, running_s3_server, s3_config
from harness.waiting import WAIT_S
from sgl_kvfetch.directory import FrontStore, LocalStore
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores import AdminStore, HttpOptions
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.remote import RemoteStore
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
        server.make_bucket()
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


@pytest.fixture(params=["http", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(kind: str, proxy: FaultyProxy, s3_proxy: FaultyProxy) -> FaultyProxy:
    return proxy if kind == "http" else s3_proxy


MakeClient = Callable[..., RemoteStore]


@pytest.fixture
async def make(kind: str, link: FaultyProxy) -> AsyncIterator[MakeClient]:
    """Makes clients behind the link."""
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> RemoteStore:
            how = HttpOptions(**{"timeout_s": WAIT_S, "backoff_s": 0.01} | options)
            store: RemoteStore = HttpStore(link.url, options=how)
            if kind == "s3":
                store = S3Store(f"s3://{BUCKET}/kv", options=how, config=s3_config(link.url))
            stack.push_async_callback(store.close)
            return store

        yield make


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


@asynccontextmanager
async def saying(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The URL of a server that gives each connection this answer, and closes it."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls) as server:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def opened(kind: str, folder: Path, request: pytest.FixtureRequest, **options: Any) -> AsyncIterator[AdminStore]:
    """Open a store of one of the kinds. ``options``: of a directory, or of the server of one."""
    store: AdminStore
    async with AsyncExitStack() as stack:
        if kind in ("served", "served front"):
            config = ServerConfig(folder / "served", port=0, grace_s=1, **options)
            server = await stack.enter_async_context(running_server(config))
            if kind == "served front":
                config = ServerConfig(folder / "near", port=0, grace_s=1, upstream=server.url)
                server = await stack.enter_async_context(running_server(config))
            store = HttpStore(server.url)
        elif kind == "front":
            store = FrontStore(folder / "near", LocalStore(folder / "far"))
        elif kind == "directory":
            store = LocalStore(folder / "store", min_free_bytes=0, **options)
        else:
            s3 = request.getfixturevalue("ceph_server" if kind.startswith("ceph") else "s3_server")
            url = f"s3://{BUCKET}/{folder.name}-{secrets.token_hex(4)}"
            if kind.endswith("with index"):
                index = IndexOptions(request.getfixturevalue("redis_server").url, timeout_s=WAIT_S)
                store = IndexedS3Store(url, index, config=s3.config)
            else:
                store = S3Store(url, config=s3.config)
        stack.push_async_callback(store.close)
        yield store


@pytest.fixture(params=["directory", "served", "bucket"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminStore]:
    """One of each kind that keeps things beside segments, or of the kinds that a test has as parameters."""
    async with opened(request.param, tmp_path, request) as store:
        yield store
