from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.directory.local import LocalStore
from tests.directory.conftest import disk_bytes, unfinished
from tests.directory.killed_writer import NUM_PAGES


def write_and_die(root: Path, turn: int, after_s: float) -> set[str]:
    """Return the segments that were acknowledged, and that nobody began to delete."""
    command = [sys.executable, "-m", "tests.directory.killed_writer", str(root), str(turn)]
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
        for name in expected:
            chain = page_hashes(NUM_PAGES, name)
            (hit,) = (await store.lookup(FOLDER, chain)).hits
            segment = make_segment(chain, 0, NUM_PAGES, content=int(name.partition(".")[2]))
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
