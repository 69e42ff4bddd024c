"""What tests and benchmarks rely on: nothing is left running, links are as slow as they say, faults are heard."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.stores.http import HttpStore

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]

# A store behind a slow link, a server in a session of its own with a child of its own, and a temporary folder.
SCRIPT = """
import subprocess, sys, tempfile, time
from harness.children import start_child
from harness.store_process import StoreProcess

SLEEP = "import time; print('all have started', flush=True); time.sleep(3600)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder, StoreProcess(folder, link_gbps=1):
    start_child([sys.executable, "-c", CHILD], start_new_session=True)
    time.sleep(3600)
"""


def _is_running(process: psutil.Process) -> bool:
    """A zombie has ended: whoever adopted it has not looked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_children_and_theirs_end(tmp_path: Path) -> None:
    folders, log = tmp_path / "folders", tmp_path / "log"
    folders.mkdir()
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folders)], cwd=ROOT, stdout=out, stderr=out)
    started: list[psutil.Process] = []
    try:
        wait_until(lambda: "all have started" in log.read_text() or process.poll() is not None, found=log.read_text)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) != 0
        wait_until(lambda: not any(map(_is_running, started)), found=lambda: [*filter(_is_running, started)])
    finally:
        for each in filter(_is_running, started):
            each.kill()
        process.kill()
        process.wait()
    assert not [*folders.iterdir()]
    assert "the store ended by itself" not in log.read_text()


BYTES_PER_S = 12_500_000  # of a link of 0.1 Gbps


async def test_a_store_sends_reads_and_lookups_at_the_links_speed(tmp_path: Path) -> None:
    """All readers together: two that read at once get half of it each."""
    contents = bytes(2_000_000), bytes(1_999_999)
    with StoreProcess(tmp_path, link_gbps=0.1) as process:
        store = HttpStore(process.url)
        for content in contents:
            await store.put(data_object(content), content)
        started = time.monotonic()
        assert await asyncio.gather(*(store.get(data_object(content)) for content in contents)) == [*contents]
        assert time.monotonic() - started > 0.8 * 4_000_000 / BYTES_PER_S
        segment = make_segment(page_hashes(4), 0, 4)
        await put_segment(store, segment)
        await store.close()
    with StoreProcess(tmp_path, link_gbps=0.00001) as process:  # 1,250 bytes a second
        store = HttpStore(process.url)
        started = time.monotonic()
        assert (await store.lookup(FOLDER, page_hashes(4))).num_pages == 4
        assert time.monotonic() - started > 0.8 * len(segment.manifest.encode()) / 1250
        await store.close()
