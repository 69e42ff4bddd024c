"""Pictures of segments on the page: what a process of its own draws, and what it may take."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.server import pictures
from sgl_kvfetch.stores import wire
from sgl_kvfetch.testing import make_segment, page_hashes, put_segment
from tests.server.test_pages import get, serving

pytestmark = pytest.mark.process

SEGMENT = make_segment(page_hashes(4), 0, 4)
PATH = f"{wire.Route.PICTURES}/{SEGMENT.manifest.key.manifest_name}"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that draws imports for more than a minute on a busy machine."""
    monkeypatch.setattr(pictures, "_PICTURE_S", WAIT_S)


async def test_no_more_pictures_than_a_few_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_PICTURES", 0)
    async with serving(tmp_path, SEGMENT) as session:
        assert "being drawn" in (await get(session, PATH, status=503))["message"]


async def test_pictures_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, SEGMENT) as session:
        async with session.get(PATH) as response:
            assert (response.status, response.content_type) == (200, "image/png")
            assert (await response.read()).startswith(b"\x89PNG")
        for span in ("9", "-1", "x"):
            assert "expected 0 to" in (await get(session, PATH, status=400, span=span))["message"]
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        assert "nothing was drawn" in (await get(session, PATH, status=501))["message"]


async def test_a_picture_s_process_knows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nenv | tr '\\n' ' ' >&2\nexit 1\n")
    script.chmod(0o700)
    secrets = ("KVFETCH_TOKEN", "AWS_SECRET_ACCESS_KEY", "REDIS_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(sys, "executable", str(script))
    async with serving(tmp_path / "store", SEGMENT) as session:
        message = (await get(session, PATH, status=501))["message"]
    assert "PATH=" in message
    assert "secret" not in message
    assert not [name for name in secrets if name in message]


async def test_a_message_about_a_picture_has_no_path_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$4 cannot be read" >&2\nexit 1\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    async with serving(tmp_path / "store", SEGMENT) as session:
        message = (await get(session, PATH, status=501))["message"]
    assert message.endswith("the store cannot be read")


async def test_a_picture_has_a_size_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_BYTES", 100)
    async with serving(tmp_path, SEGMENT) as session:
        assert "more than 100 bytes" in (await get(session, PATH, status=501))["message"]


def test_a_picture_s_process_takes_little_memory_and_writes_no_file(tmp_path: Path) -> None:
    """What it does after it has loaded its libraries."""
    code = f"""
from sgl_kvfetch.tools import pictures
pictures._limit()
try:
    bytearray(2 * pictures.MOST_BYTES)
except MemoryError:
    print("no memory")
try:
    with open({str(tmp_path / "file")!r}, "wb") as file:
        file.write(b"x")
except OSError as e:
    print(e.strerror)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["no memory", "File too large"]


def test_nothing_is_left_of_a_picture_when_the_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    asyncio.run(_put(tmp_path / "store"))
    with StoreProcess(tmp_path / "store") as store:
        asking = threading.Thread(target=_ask, args=(f"{store.url}{PATH}",))
        asking.start()
        wait_until(lambda: bool(children(store.pid)))
        (drawing,) = children(store.pid)
        started = _started(drawing)
        wait_until(lambda: b"pictures" in Path(f"/proc/{drawing}/cmdline").read_bytes())
        store.kill()
        asking.join()
        wait_until(lambda: _started(drawing) != started, found=lambda: "the process that draws goes on")
    assert list((tmp_path / "tmp").iterdir()) == []


async def _put(root: Path) -> None:
    store = LocalStore(root)
    await put_segment(store, SEGMENT)
    await store.close()


def _ask(url: str) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(url).read()


def _started(pid: int) -> str:
    """Return when a process was started, so that its number is not taken for another one's; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
