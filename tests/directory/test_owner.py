from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.codec import CodedSegment, decode_manifest
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError
from tests.directory.conftest import disk_bytes, unfinished

SEGMENT = make_segment(page_hashes(4), 0, 4)


async def test_a_directory_belongs_to_one_store(tmp_path: Path) -> None:
    """From the moment at which it creates it; and to the next one when the first is closed."""
    tmp_path /= "new"
    first, other = LocalStore(tmp_path), LocalStore(tmp_path)
    assert (await first.usage()).num_segments == 0
    await put_segment(first, SEGMENT)
    has_it = f"process {os.getpid()} has {tmp_path}: wait for its end; to share the directory, run `kvfetch serve "
    for use in (other.usage, lambda: other.get(SEGMENT.data_name), lambda: put_segment(other, SEGMENT)):
        with pytest.raises(StoreError, match=re.escape(has_it)):
            await use()
    first.owner.say_url("http://127.0.0.1:8700")
    with pytest.raises(StoreError, match=r"serves .*: use http://127\.0\.0\.1:8700 instead"):
        await other.usage()
    await put_segment(first, SEGMENT)
    await first.close()
    assert (await other.usage()).num_segments == 1
    await other.close()


@pytest.mark.process
def test_commands_and_servers_name_the_url_of_a_directory_that_is_served(tmp_path: Path) -> None:
    def run(*command: str) -> tuple[int, str]:
        args = [sys.executable, "-m", "sgl_kvfetch.tools", *command]
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    with StoreProcess(tmp_path) as store:
        for command in (("inspect", str(tmp_path)), ("serve", str(tmp_path), "--port", "0")):
            code, said = run(*command)
            assert code != 0
            assert f"process {store.pid} serves {tmp_path}: use {store.url} instead" in said
        store.kill()
        assert run("verify", str(tmp_path))[0] == 0
        store.start()
    assert not (tmp_path / ".served").exists()


def segment_of(name: str) -> CodedSegment:
    return make_segment(page_hashes(16, name), 0, 16, content=int(name.partition(".")[2]))


async def write(root: Path, turn: str) -> None:
    """Write and delete until killed. Print each segment that is acknowledged, and each that is about to be deleted."""
    store, number = LocalStore(root), 0
    while True:
        name = f"{turn}.{number}"
        await put_segment(store, segment_of(name))
        print(f"put {name}", flush=True)
        if number % 3 == 2:
            print(f"delete {name}", flush=True)
            await store.delete(segment_of(name).manifest.key.manifest_name)
        number += 1


def write_and_die(root: Path, turn: int, after_s: float) -> set[str]:
    """Return the segments that were acknowledged, and that nobody began to delete."""
    command = [sys.executable, "-m", "tests.directory.test_owner", str(root), str(turn)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(after_s)
        writer.kill()
        lines = [first, *writer.stdout]
    said = [line.split() for line in lines if line.endswith("\n")]
    return {name for what, name in said if what == "put"} - {name for what, name in said if what == "delete"}


@pytest.mark.process
async def test_an_owner_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    """The next one has the directory at once, and finds it right."""
    pause, expected = random.Random(0), set[str]()
    for turn in range(3):
        expected |= await asyncio.to_thread(write_and_die, tmp_path, turn, pause.uniform(0, 0.2))
        store = LocalStore(tmp_path, orphan_age_s=0.001)
        for segment in map(segment_of, expected):
            (hit,) = (await store.lookup(FOLDER, segment.manifest.page_hashes)).hits
            assert decode_manifest(hit.manifest) == segment.manifest
            assert await store.get(segment.data_name) == segment.data
        assert unfinished(tmp_path) == []
        await asyncio.sleep(0.01)
        await store.collect()
        usage = await store.usage()
        assert usage.stored_bytes == disk_bytes(tmp_path)
        assert usage.num_segments >= len(expected)
        await store.close()
    assert len(expected) > 3


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
