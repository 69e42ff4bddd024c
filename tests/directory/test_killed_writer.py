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

NUM_SEGMENTS = 4


def write_and_die(root: Path, segments: Path, after_s: float) -> None:
    script = Path(__file__).with_name("killed_writer.py")
    with subprocess.Popen([sys.executable, script, root, segments], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        writer.kill()


@pytest.mark.slow
async def test_a_killed_writer_leaves_no_half_segment(tmp_path: Path) -> None:
    chain = page_hashes(NUM_SEGMENTS * 512)
    segments = [make_segment(chain, i * 512, 512) for i in range(NUM_SEGMENTS)]
    contents = {}
    for segment in segments:
        contents[segment.data_name] = segment.data
        contents[segment.manifest.key.manifest_name] = segment.manifest.encode()
    work = tmp_path / "segments"
    work.mkdir()
    (work / "names").write_text("\n".join(contents))
    for i, content in enumerate(contents.values()):
        (work / str(i)).write_bytes(content)

    root = tmp_path / "store"
    store = LocalStore(root, orphan_age_s=0.001)
    pause = random.Random(0)
    for _ in range(8):
        await asyncio.to_thread(write_and_die, root, work, pause.uniform(0, 0.1))
        for info in [info async for info in store.list()]:
            assert await store.get(info.name) == contents[info.name]
        for first in range(0, len(chain), 512):
            for hit in (await store.lookup(FOLDER, chain[first : first + 512])).hits:
                manifest = decode_manifest(hit.manifest)
                assert await store.get(manifest.data_name(manifest.variants[0])) is not None
    await asyncio.sleep(0.01)
    await store.collect()
    assert list(root.rglob(".tmp-*")) == []
    await store.close()
