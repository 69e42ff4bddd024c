from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sgl_kvfetch.directory.front import FrontStore
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpStore
from tests.stores.conformance import AdminStoreConformance


class TestLocalStore(AdminStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = LocalStore(tmp_path / "store")
        yield store
        await store.close()


class TestBoundedLocalStore(AdminStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = LocalStore(tmp_path / "store", capacity_bytes=100 << 20)
        yield store
        await store.close()


@pytest.mark.process
class TestHttpStore(AdminStoreConformance):
    @pytest.fixture
    async def store(self, server: RunningServer) -> AsyncIterator[Store]:
        store = HttpStore(server.url)
        yield store
        await store.close()


class TestFrontStore(AdminStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = FrontStore(tmp_path / "near", LocalStore(tmp_path / "far"))
        yield store
        await store.close()


@pytest.mark.process
class TestServedFrontStore(AdminStoreConformance):
    @pytest.fixture
    async def store(self, server: RunningServer, tmp_path: Path) -> AsyncIterator[Store]:
        async with running_server(ServerConfig(tmp_path / "near", port=0, grace_s=1, upstream=server.url)) as near:
            store = HttpStore(near.url)
            yield store
            await store.close()
