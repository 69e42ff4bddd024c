from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server, running_s3_server
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.redis_index import IndexOptions, PageIndex
from sgl_kvfetch.stores.s3 import S3Store
from sgl_kvfetch.testing import expiring, make_segment, page_hashes
from tests.segments import put_all, using
from tests.tools.conftest import Stored, kvfetch, kvfetch_json, unchanged

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(12)
SEGMENTS = [make_segment(CHAIN, first, 4) for first in (0, 4, 8)]
KEYS = [segment.manifest.key for segment in SEGMENTS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


def names(store: AdminStore) -> set[str]:
    async def listed(store: AdminStore) -> set[str]:
        return {info.name async for info in store.list()}

    return using(store, listed)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A bucket with three segments, which the environment leads to."""
    with running_s3_server() as server:
        for key, value in server.config.items():
            monkeypatch.setenv(f"AWS_{key.upper()}", value)
        put_all(S3Store(URL), *SEGMENTS)
        yield server


@pytest.mark.process
@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
def test_a_bucket_with_an_index(s3: S3Server) -> None:
    async def use_all_but_the_second(redis: RedisProcess) -> None:
        pages = PageIndex(IndexOptions(redis.url, timeout_s=WAIT_S), URL)
        await pages.note_uses({KEYS[0]: 4e9, KEYS[2]: 4e9})
        await pages.close()

    with RedisProcess() as redis:
        asyncio.run(use_all_but_the_second(redis))
        options = (URL + "/", "--index", redis.url, "--capacity", f"{2 * SIZE + SIZE // 2}", "--grace", "0")
        result = kvfetch("gc", *options, "--dry-run")
        assert result.exit_code == 0, result.output
        assert KEYS[1].stem in result.output
        assert "would delete 1 segments, 0 of them expired, and 0 that are not whole" in result.output
        assert len(names(S3Store(URL))) == 6

        result = kvfetch("gc", *options)
        assert result.exit_code == 0, result.output
        assert result.output.startswith("deleted 1 segments, 0 of them expired, and 0 that are not whole")
        assert "2 segments stay" in result.output
        assert not any(KEYS[1].stem in name for name in names(S3Store(URL)))

        redis.client.set(PageIndex(IndexOptions(redis.url, timeout_s=WAIT_S), URL)._key(b"lease"), b"another")
        result = kvfetch("gc", *options)
        assert result.exit_code == 2
        assert "another sweeper is at work" in result.output


@pytest.mark.process
def test_a_bucket_without_an_index(s3: S3Server) -> None:
    summary = kvfetch_json("gc", URL, "--capacity", "1", "--grace", "0")
    assert set(summary["evicted"]) == {key.stem for key in KEYS}
    assert summary["deleted"] == {
        "num_objects": 6,
        "num_bytes": summary["stored_bytes"],
        "num_levels": 0,
        "failures": {},
    }
    assert names(S3Store(URL)) == set()


@pytest.mark.process
def test_without_limits_only_expired_segments_go(s3: S3Server, later: Callable[[float], None]) -> None:
    put_all(S3Store(URL), expiring(SEGMENTS[1], time.time() + 3600))
    later(3000)
    result = kvfetch("gc", URL, "--grace", "0")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("deleted 0 segments, 0 of them expired, and 0 that are not whole")
    later(4000)
    summary = kvfetch_json("gc", URL, "--grace", "0")
    assert (summary["num_expired"], summary["evicted"]) == (1, [KEYS[1].stem])
    assert not any(KEYS[1].stem in name for name in names(S3Store(URL)))


def test_a_directory(stored: Stored) -> None:
    with unchanged(stored.root):
        result = kvfetch("gc", str(stored.root), "--capacity", "1TiB")
    assert result.exit_code == 0, result.output
    assert "3 segments stay" in result.output
    result = kvfetch("gc", stored.url, "--capacity", "1", "--grace", "0")
    assert result.exit_code == 0, result.output
    assert names(LocalStore(stored.root)) == set()


def test_quotas(stored: Stored) -> None:
    with unchanged(stored.root):
        result = kvfetch("gc", stored.url, "--quota", "no=such=model=1GiB", "--quota", "0123=1")
    assert result.exit_code == 1, result.output
    assert "3 segments stay" in result.output
    assert "FAILED --quota no=such=model: nothing is stored of this model" in result.output
    stems = [segment.manifest.key.stem for segment in stored.segments]
    folder = stems[0].partition("/")[0]
    summary = kvfetch_json("gc", stored.url, "--quota", f"{folder}=1", "--grace", "0")
    inside = {stem for stem in stems if stem.startswith(folder)}
    assert set(summary["evicted"]) == inside
    assert summary["unused_quotas"] == []
    left = names(LocalStore(stored.root))
    assert left
    assert not any(name.startswith(f"{folder}/") for name in left)


def test_malformed_limits_are_refused(tmp_path: Path) -> None:
    for options, message in (
        (("--quota", "1GiB"), "MODEL=SIZE"),
        (("--quota", "llama=1GiB", "--quota", "llama=2GiB"), "each MODEL once"),
        (("--quota", "llama=1G"), "invalid size"),
    ):
        result = kvfetch("gc", str(tmp_path), *options)
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize(
    ("store", "options", "message"),
    [
        ("http://127.0.0.1:1", (), "kvfetch serve --capacity"),
        ("http://127.0.0.1:1", ("--quota", "llama=1GiB"), "on its directory"),
        ("/no/such/directory", (), "is not a directory"),
        ("s3://bucket", ("--capacity", "10G"), "invalid size"),
        (".", ("--index", "redis://127.0.0.1:1"), "has its own"),
        ("s3://bucket", ("--index", "http://127.0.0.1:1"), "the index's URL"),
    ],
)
def test_what_makes_no_sense_is_refused(store: str, options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = kvfetch("gc", store, *(() if "--capacity" in options else ("--capacity", "1GiB")), *options)
    assert result.exit_code == 2
    assert message in result.output
