from __future__ import annotations

import asyncio
from pathlib import Path

import boto3
import pytest

from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import make_segment, page_hashes
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.stores.redis_index import IndexOptions, PageIndex
from sgl_kvfetch.stores.s3 import S3Store
from tests.segments import names, put_all, using
from tests.tools.conftest import Stored, kvfetch, unchanged

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(12)
SEGMENTS = [make_segment(CHAIN, first, 4) for first in (0, 4, 8)]
KEYS = [segment.manifest.key for segment in SEGMENTS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


@pytest.fixture
def s3(s3: S3Server) -> S3Server:
    """Its bucket has three segments."""
    put_all(S3Store(URL), *SEGMENTS)
    return s3


@pytest.mark.process
@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
def test_a_bucket_with_an_index(s3: S3Server) -> None:
    async def use_all_but_the_second(redis: RedisProcess) -> None:
        pages = PageIndex(IndexOptions(redis.url, timeout_s=WAIT_S), URL)
        await pages.record_uses({KEYS[0]: 4e9, KEYS[2]: 4e9})
        await pages.close()

    with RedisProcess() as redis:
        asyncio.run(use_all_but_the_second(redis))
        options = (URL + "/", "--index", redis.url, "--capacity", f"{2 * SIZE + SIZE // 2}B", "--grace", "0", "--yes")
        result = kvfetch("gc", *options, "--dry-run")
        assert result.exit_code == 0, result.output
        assert KEYS[1].stem in result.output
        assert "would delete 1 segments, 0 of them expired, and 0 that are not whole" in result.output
        assert len(using(S3Store(URL), names)) == 6

        assert "2 segments stay" in kvfetch("gc", *options).output
        assert not any(KEYS[1].stem in name for name in using(S3Store(URL), names))

        redis.client.set(PageIndex(IndexOptions(redis.url, timeout_s=WAIT_S), URL)._key(b"lease"), b"another")
        result = kvfetch("gc", *options)
        assert result.exit_code == 2
        assert "another gc run holds the lock" in result.output


def test_it_shows_what_it_would_delete_and_asks(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("gc", stored.url, "--capacity", "1B", "--grace", "0")
    with unchanged(stored.root):
        result = kvfetch(*options)
        assert result.exit_code == 2
        assert "would delete 3 segments" in result.stdout
        assert "add --yes" in result.stderr
        assert kvfetch(*options, "--json").stdout == ""
        assert kvfetch("gc", str(stored.root), "--capacity", "1TiB").exit_code == 0  # nothing to ask about
    monkeypatch.setattr("sgl_kvfetch.tools.upkeep.ask_to_delete", lambda err: None)  # the answer is yes
    result = kvfetch("gc", stored.url, "--capacity", "1B", "--grace", "0.1")
    assert "deleted 3 segments" in result.stdout
    assert "3 manifests are deleted; their data follows in 0.1 s, after its last readers\n" in result.stderr
    assert using(LocalStore(stored.root), names) == set()


@pytest.mark.process
@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
def test_a_bucket_with_versions_keeps_what_is_deleted(s3: S3Server, tmp_path: Path, status: str) -> None:
    """Suspended, it keeps only what had a version before."""
    keys = {f"aws_{key}": s3.config[key] for key in ("access_key_id", "secret_access_key")}
    client = boto3.client("s3", endpoint_url=s3.config["endpoint"], region_name="us-east-1", **keys)
    using(S3Store(URL), lambda store: store.delete_prefix(""))
    commands = [("gc", URL, "--capacity", "1B", "--grace", "0", "--yes"), ("clear", URL, "--yes")]
    for command in commands:
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": status})
        put_all(S3Store(URL), *SEGMENTS)
        result = kvfetch(*command)
        assert result.exit_code == 0, result.output
        assert ("the bucket has versions: it keeps" in result.output) == (status == "Enabled"), command
        versions = client.list_object_versions(Bucket=BUCKET)
        assert ("Versions" in versions) == (status == "Enabled")
        if command[0] == "gc":
            assert (": 0 B of " in result.output) == (status == "Enabled")
