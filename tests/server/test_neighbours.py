"""What other users of the store's machine, and web pages in their browsers, get of it: nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from sgl_kvfetch import processes
from sgl_kvfetch.codec import StoreKeys
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.server import run
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.server.tokens import TokenFile
from sgl_kvfetch.stores import Pin, TlsFiles, wire
from sgl_kvfetch.stores.notes import put_pin
from tests.server.serving import serving

SEGMENT = make_segment(page_hashes(4), 0, 4)
NAME = SEGMENT.manifest.key.manifest_name
ROUTES = (
    ("GET", wire.Route.HEALTH),
    ("GET", wire.Route.METRICS),
    ("GET", wire.Route.OBJECTS),
    ("GET", f"{wire.Route.OBJECTS}/{NAME}"),
    ("PUT", f"{wire.Route.OBJECTS}/{data_object(b'')}"),
    ("DELETE", f"{wire.Route.OBJECTS}/{NAME}"),
    ("DELETE", f"{wire.Route.OBJECTS}?prefix="),
    ("POST", f"{wire.Route.CHECK}/{NAME}"),
    ("GET", f"{wire.Route.NOTES}/pins"),
    ("GET", f"{wire.Route.NOTES}/pins/{'0' * 64}"),
    ("DELETE", f"{wire.Route.NOTES}/pins/{'0' * 64}"),
    ("GET", wire.Route.SUMMARY),
    ("GET", f"{wire.Route.SEGMENTS}?folder={FOLDER}"),
    ("GET", wire.Route.FOLDERS),
    ("GET", f"{wire.Route.HEALTH}?write"),
)


@pytest.mark.process
@pytest.mark.parametrize("in_the_way", [".catalog", ".pins"])
async def test_no_answer_but_the_page_s_has_the_store_s_path(tmp_path: Path, in_the_way: str) -> None:
    root = tmp_path / "hidden"
    root.mkdir()
    (root / in_the_way).write_bytes(b"in the way")
    failed = 0
    async with running_server(ServerConfig(root, port=0, grace_s=1)) as server, aiohttp.ClientSession() as session:
        for method, path in ROUTES:
            async with session.request(method, f"{server.url}{path}") as answer:
                failed += answer.status >= 500
                if path != wire.Route.SUMMARY:  # the page's title names the directory
                    assert "hidden" not in await answer.text(), (method, path)
    assert failed


def modes(root: Path) -> dict[str, tuple[bool, int]]:
    return {path.name: (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in root.rglob("*")}


async def test_files_are_their_owner_s(tmp_path: Path) -> None:
    store, before = LocalStore(tmp_path), os.umask(0o022)
    try:
        await put_segment(store, SEGMENT)
        await put_pin(store, Pin("kept", 1, b"".join(SEGMENT.manifest.page_hashes)))
        async with store.upload(data_object(b"x")) as upload:
            await upload.write(b"x")
            found = modes(tmp_path)
    finally:
        os.umask(before)
        await store.close()
    assert {".pins", ".catalog", ".unfinished", FOLDER} <= set(found)
    assert set(found.values()) == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize(
    "read",
    [
        TokenFile,
        StoreKeys.read,
        lambda path: ServerConfig(Path(), tls_cert=path, tls_key=path).tls_context(),
        lambda path: TlsFiles(cert=str(path), key=str(path)).context(),
    ],
)
def test_a_secret_that_all_may_read_is_warned_of(
    tmp_path: Path, read: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.write_text("")
    for mode, warned in ((0o644, True), (0o640, False), (0o600, False)):
        path.chmod(mode)
        caplog.clear()
        with pytest.raises(Exception, match="secret"):
            read(path)
        assert (f"chmod 600 {path}" in caplog.text) == warned


def test_a_server_s_memory_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes no core dump, which would have tokens, while it serves."""
    dumpable = []

    async def serve(config: ServerConfig) -> None:
        dumpable.append(processes._prctl(processes._GET_DUMPABLE))

    monkeypatch.setattr(run, "serve_until_signal", serve)
    run.run_server(ServerConfig(tmp_path))
    assert (dumpable, processes._prctl(processes._GET_DUMPABLE)) == ([0], 1)


@pytest.mark.process
async def test_a_store_without_tokens_refuses_other_sites_pages(tmp_path: Path) -> None:
    async with serving(tmp_path / "open") as (_, session), serving(tmp_path / "closed", token="secret") as (_, closed):
        for site in ("same-origin", "none", "cross-site", "same-site"):
            headers = {"Sec-Fetch-Site": site}
            for method, path in ROUTES:
                async with session.request(method, path, headers=headers) as answer:
                    refused = site in ("cross-site", "same-site") and not path.startswith(wire.Route.HEALTH)
                    assert (answer.status == 403) == refused, (site, path)
            async with session.get("/", headers=headers) as answer:
                assert answer.status == 200  # by a link
            authorised = headers | {"Authorization": "Bearer secret"}
            async with closed.get(wire.Route.SUMMARY, headers=authorised) as answer:
                assert answer.status == 200  # whoever knows the token
