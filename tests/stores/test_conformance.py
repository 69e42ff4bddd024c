from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.faults import FaultyProxy
from harness.store_conformance import StoreConformance
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.server.run import RunningServer
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.hedged import HedgedStore
from sgl_kvfetch.stores.http import HttpStore


class TestLocalStore(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = LocalStore(tmp_path / "store")
        yield store
        await store.close()


class TestBoundedLocalStore(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = LocalStore(tmp_path / "store", capacity_bytes=100 << 20)
        yield store
        await store.close()


class TestHttpStore(StoreConformance):
    @pytest.fixture
    async def store(self, server: RunningServer) -> AsyncIterator[Store]:
        store = HttpStore(server.url)
        yield store
        await store.close()


class TestHttpStoreThroughProxy(StoreConformance):
    """The proxy makes one connection per request. This also shows that the proxy itself breaks nothing."""

    @pytest.fixture
    async def store(self, proxy: FaultyProxy) -> AsyncIterator[Store]:
        store = HttpStore(proxy.url)
        yield store
        await store.close()


class TestHedgedStore(StoreConformance):
    @pytest.fixture
    async def store(self, server: RunningServer) -> AsyncIterator[Store]:
        store = HedgedStore(HttpStore(server.url), max_reads=8)
        yield store
        await store.close()


class TestDiskTier(StoreConformance):
    @pytest.fixture
    async def store(self, server: RunningServer, tmp_path: Path) -> AsyncIterator[Store]:
        store = DiskTier(HttpStore(server.url), LocalStore(tmp_path / "disk", capacity_bytes=100 << 20))
        yield store
        await store.close()
