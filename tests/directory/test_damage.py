"""Readers report damage, and the store checks its own bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.directory import files, repair
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.segments import names
from tests.stores.conformance import failing

CHAIN = page_hashes(4)
SEGMENT = make_segment(CHAIN, 0, 4)
MANIFEST = SEGMENT.manifest.key.manifest_name


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    await put_segment(store, SEGMENT)
    yield store
    await store.close()


def flip(path: Path, place: int = 10) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


async def test_a_sound_segment_stays(store: LocalStore) -> None:
    assert not await store.report_damage(MANIFEST)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert await names(store) == {MANIFEST, SEGMENT.data_name}


@pytest.mark.parametrize("change", [flip, lambda path: path.write_bytes(b"short"), Path.unlink])
async def test_a_segment_with_broken_data_is_deleted(store: LocalStore, tmp_path: Path, change: object) -> None:
    change(tmp_path / SEGMENT.data_name)  # type: ignore[operator]
    assert await store.report_damage(MANIFEST)
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    assert await names(store) == set()
    await put_segment(store, SEGMENT)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert not await store.report_damage(MANIFEST)


async def test_sound_data_of_a_broken_segment_stays(store: LocalStore, tmp_path: Path) -> None:
    await store.delete_prefix("")
    segment = transcode(SEGMENT.manifest, SEGMENT.data, make_targets(["deflate", "zstd"], ["240p"]))
    await put_segment(store, segment)
    broken, sound = [segment.manifest.data_name(variant) for variant in segment.manifest.variants]
    flip(tmp_path / broken)
    assert await store.report_damage(MANIFEST)
    assert await names(store) == {sound}


async def test_a_broken_manifest_is_deleted_and_its_data_is_not(store: LocalStore, tmp_path: Path) -> None:
    flip(tmp_path / MANIFEST)
    assert await store.report_damage(MANIFEST)
    assert await names(store) == {SEGMENT.data_name}


async def test_a_missing_segment_is_no_damage_until_it_is_there(store: LocalStore, tmp_path: Path) -> None:
    await store.delete_prefix("")
    assert not await store.report_damage(MANIFEST)
    with failing("invalid"):
        await store.report_damage(data_object(b"x"))
    await put_segment(store, SEGMENT)
    flip(tmp_path / SEGMENT.data_name)
    assert await store.report_damage(MANIFEST)


async def test_many_reports_of_a_segment_are_one_check(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    go_on = threading.Event()
    open_object = files.open_object

    def counted(root: Path, name: str) -> files.OpenObject | None:
        assert go_on.wait(60)
        opened.append(name)
        return open_object(root, name)

    monkeypatch.setattr(files, "open_object", counted)
    reports = [asyncio.create_task(store.report_damage(MANIFEST)) for _ in range(20)]
    await asyncio.sleep(0)
    reports[0].cancel()  # does not end the check for the others
    go_on.set()
    assert await asyncio.gather(*reports[1:]) == [False] * 19
    assert not await store.report_damage(MANIFEST)  # it was found sound
    assert opened.count(SEGMENT.data_name) == 1


async def test_reports_of_many_segments_are_bounded(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    checked: list[str] = []

    def check(checks: object, name: str) -> bool:
        assert go_on.wait(60)
        checked.append(name)
        return False

    monkeypatch.setattr(repair.DamageChecks, "_check", check)
    segments = [make_segment(page_hashes(4, str(i)), 0, 4).manifest.key.manifest_name for i in range(100)]
    reports = [asyncio.create_task(store.report_damage(name)) for name in segments]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(report.done() for report in reports) >= 80  # ignored
    go_on.set()
    assert not any(await asyncio.gather(*reports))
    assert len(checked) <= 20


async def test_a_segment_that_is_replaced_during_the_check_stays(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(tmp_path / SEGMENT.data_name)
    read, go_on = threading.Event(), threading.Event()
    broken_data = repair.DamageChecks._broken_data

    def slow(checks: repair.DamageChecks, name: str, content: bytes) -> list[str] | None:
        found = broken_data(checks, name, content)
        read.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(repair.DamageChecks, "_broken_data", slow)
    report = asyncio.create_task(store.report_damage(MANIFEST))
    assert await asyncio.to_thread(read.wait, 60)
    await put_segment(store, SEGMENT)
    go_on.set()
    assert not await report
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert await store.get(SEGMENT.data_name) == SEGMENT.data
