"""What the page shows of segments whose writers chose odd texts: it never fails because of them."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from harness.small_segments import make_segment, page_hashes
from harness.waiting import until
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.server import web as pages
from sgl_kvfetch.stores import wire
from tests.odd_segments import odd_segments
from tests.server.test_web import get, serving


def test_a_text_that_only_looks_like_klt_is_shown_as_it_is() -> None:
    text = "klt(profile=0123456789abcdef0123456789abcdef;step=1.2.3)"
    assert Labels().quantiser_name(text) == text


@pytest.mark.process
async def test_odd_texts_are_shown_and_fail_no_request(tmp_path: Path) -> None:
    segments = list(odd_segments())
    async with serving(tmp_path, *segments) as session:
        rows = {row["folder"]: row for row in (await get(session, wire.Route.SUMMARY))["folders"]}
        for segment in segments:
            manifest = segment.manifest
            name, namespace = manifest.key.manifest_name, manifest.namespace
            about = await get(session, f"{wire.Route.SEGMENTS}/{name}")
            for found in (about, rows[manifest.heads.folder]):
                assert found["model_identity"] == namespace.model[:200]
                assert found["quantiser_identity"] == namespace.quantiser[:200]
            assert len(await get(session, wire.Route.SEGMENTS, folder=manifest.heads.folder)) == 1


@pytest.mark.process
@pytest.mark.parametrize("fault", [ValueError("a text that nobody thought of"), StoreError("io", "a bad sector")])
async def test_a_folder_that_cannot_be_shown_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Because of its names, or as its manifest cannot be read."""
    good, bad = make_segment(page_hashes(4), 0, 4), make_segment(page_hashes(4), 0, 4, model="bad")
    names, peek = Labels.model_name, LocalStore.peek

    def fail_by_name(labels: Labels, identity: str) -> str:
        if identity == "bad":
            raise fault
        return names(labels, identity)

    async def fail_to_read(store: LocalStore, name: str) -> bytes | None:
        if name == bad.manifest.key.manifest_name:
            raise fault
        return await peek(store, name)

    if isinstance(fault, StoreError):
        monkeypatch.setattr(LocalStore, "peek", fail_to_read)
    else:
        monkeypatch.setattr(Labels, "model_name", fail_by_name)
    async with serving(tmp_path, good, bad) as session:
        rows = {row["folder"]: row for row in (await get(session, wire.Route.SUMMARY))["folders"]}
    assert rows[good.manifest.heads.folder]["model"] == "conformance"
    assert rows[bad.manifest.heads.folder]["model"] == ""
    assert rows[bad.manifest.heads.folder]["num_segments"] == 1


@pytest.mark.process
async def test_a_folder_whose_files_are_gone_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an eviction that a full disk has undone in the catalog alone."""
    monkeypatch.setattr(pages, "_FOLDERS_AGE_S", -1.0)
    monkeypatch.setattr(pages, "_SUMMARY_AGE_S", -1.0)
    gone, kept = make_segment(page_hashes(4), 0, 4, model="gone"), make_segment(page_hashes(4), 0, 4)
    async with serving(tmp_path, gone, kept) as session:
        for path in (tmp_path / gone.manifest.heads.folder).iterdir():
            path.unlink()
        for _ in range(2):
            (row,) = (await get(session, wire.Route.SUMMARY))["folders"]
            assert (row["model"], row["num_tokens"]) == ("conformance", 4)
        await until(lambda: _num_segments(session, 1))


async def _num_segments(session: aiohttp.ClientSession, number: int) -> bool:
    return bool((await get(session, wire.Route.SUMMARY))["history"][-1]["values"]["segments"] == number)
