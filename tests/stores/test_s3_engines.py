"""The S3 store against real engines."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
from typer.testing import Result

from harness.ceph_server import CephProcess
from harness.redis_server import RedisProcess
from harness.s3_server import BUCKET
from harness.waiting import WAIT_S
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.s3 import S3Store
from tests.segments import make_segment as make_real_segment, using
from tests.stores.conformance import AdminStoreConformance
from tests.tools.conftest import kvfetch

pytestmark = pytest.mark.process


@pytest.fixture
def url() -> str:
    """An empty folder in the engine's bucket."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


class TestCeph(AdminStoreConformance):
    checks_manifests = False
    finds_parts = False

    @pytest.fixture
    async def store(self, ceph_server: CephProcess, url: str) -> AsyncIterator[Store]:
        store = S3Store(url, config=ceph_server.config)
        yield store
        await store.close()


class TestCephWithIndex(AdminStoreConformance):
    checks_manifests = False

    @pytest.fixture
    async def store(self, ceph_server: CephProcess, index: RedisProcess, url: str) -> AsyncIterator[Store]:
        store = IndexedS3Store(url, IndexOptions(index.url, timeout_s=WAIT_S), config=ceph_server.config)
        yield store
        await store.close()


def encode_one(url: str, config: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Result:
    """Put a segment, and run ``kvfetch encode``."""
    for key, value in config.items():
        monkeypatch.setenv(f"AWS_{key.upper()}", value)
    using(S3Store(url), lambda store: commit_segment(store, make_real_segment(num_pages=2)[0]))
    return kvfetch("encode", url, "--grace", "0")


def test_kvfetch_encode_on_ceph(ceph_server: CephProcess, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceph 16.2 compares the ETag without quotes."""
    result = encode_one(url, ceph_server.config, monkeypatch)
    assert result.exit_code == 0, result.output
    assert "1 segments encoded, 0 already done, 0 failed" in result.output
    assert kvfetch("verify", url).exit_code == 0
