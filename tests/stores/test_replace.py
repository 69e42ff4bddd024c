"""Replacing a manifest: tests of single stores, which the conformance suite cannot contain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from harness.small_segments import make_segment, page_hashes, put_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.run import RunningServer
from sgl_kvfetch.stores.base import object_digest
from sgl_kvfetch.stores.http import HttpStore


@pytest.mark.process
async def test_data_objects_are_never_replaced(tmp_path: Path, server: RunningServer) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    for store in (LocalStore(tmp_path / "other"), HttpStore(server.url)):
        await put_segment(store, segment)
        with pytest.raises(StoreError, match="is not a manifest") as caught:
            await store.replace(segment.data_name, segment.data, object_digest(segment.data))
        assert caught.value.reason == "invalid"
        await store.close()


async def test_a_manifest_does_not_come_back_without_its_data(tmp_path: Path) -> None:
    chain = page_hashes(4)
    old, new = make_segment(chain, 0, 4), make_segment(chain, 0, 4, codec="deflate")
    store = LocalStore(tmp_path)
    await put_segment(store, old)
    with pytest.raises(StoreError, match="is missing") as caught:
        await store.replace(old.manifest.key.manifest_name, new.manifest.encode(), object_digest(old.manifest.encode()))
    assert caught.value.reason == "invalid"
    assert await store.get(old.manifest.key.manifest_name) == old.manifest.encode()
    await store.close()


REPLACE = """
import asyncio, sys
from pathlib import Path
from sgl_kvfetch.stores.base import object_digest
from sgl_kvfetch.directory.local import LocalStore

async def main():
    root, name, new, old, turns = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
    store = LocalStore(root)
    mine, others = Path(new).read_bytes(), Path(old).read_bytes()
    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    while done < turns:
        if await store.get(name) == others:
            done += await store.replace(name, mine, object_digest(others))
        await asyncio.sleep(0)
    await store.close()

asyncio.run(main())
"""


async def put_all(root: Path, segments: list[CodedSegment]) -> None:
    store = LocalStore(root)
    for segment in segments:
        await put_segment(store, segment)
    await store.close()


@pytest.mark.slow
def test_replacing_processes_take_turns(tmp_path: Path) -> None:
    """Two processes replace each other's manifest, equally often. If one lost an update, the other would wait
    forever."""
    chain = page_hashes(4)
    segments = [make_segment(chain, 0, 4, codec=codec) for codec in ("zstd", "deflate")]
    root = tmp_path / "store"
    asyncio.run(put_all(root, segments))
    paths = [tmp_path / "0", tmp_path / "1"]
    for path, segment in zip(paths, segments, strict=True):
        path.write_bytes(segment.manifest.encode())
    name = segments[0].manifest.key.manifest_name
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", REPLACE, root, name, *pair, "20"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for pair in (paths, paths[::-1])
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"\n")
            worker.stdin.flush()
        for worker in workers:
            assert worker.wait(120) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
