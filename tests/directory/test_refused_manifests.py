"""Manifests that the catalog cannot hold, or that are made to disturb it: they cost themselves alone."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory import catalog, rows
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import object_digest
from sgl_kvfetch.stores.upkeep import decode_named_manifest
from tests.directory.conftest import MakeStore, rebuild, write_files

CHAIN = page_hashes(4)
NUM_GOOD = 100  # more than a sweep reads in one transaction
# Of XXH3's public constants: where the last 16 bytes of an input begin or end with one of them, a product is zero.
_FACTORS = 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072


def colliding_hashes(number: int = 0) -> tuple[bytes, bytes]:
    """Return two page hashes with the same key in every namespace."""
    (first, second), start, mask = _FACTORS, number.to_bytes(16, "little"), (1 << 64) - 1
    tails = (first, 12345), ((first + 12345 - second) & mask, second)
    one, other = (start + a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in tails)
    return one, other


def with_hashes(segment: CodedSegment, *hashes: bytes) -> CodedSegment:
    return replace(segment, manifest=msgspec.structs.replace(segment.manifest, page_hashes=hashes))


REPEATED = with_hashes(make_segment(CHAIN, 0, 4), CHAIN[0], CHAIN[1], CHAIN[1], CHAIN[3])
COLLIDING = with_hashes(make_segment(CHAIN, 0, 4), CHAIN[0], *colliding_hashes(), CHAIN[3])


@pytest.mark.process
async def test_no_manifest_has_a_page_hash_twice(tmp_path: Path) -> None:
    name, content = REPEATED.manifest.key.manifest_name, REPEATED.manifest.encode()
    with pytest.raises(FormatError, match="same page hash twice"):
        decode_named_manifest(content, name)
    async with running_server(ServerConfig(tmp_path, port=0, grace_s=1)) as server, aiohttp.ClientSession() as session:
        for number, body, status in ((0, REPEATED.data, 201), (1, content, 422)):
            path = f"{server.url}/v1/objects/{(REPEATED.data_name, name)[number]}"
            async with session.put(path, data=body) as answer:
                assert answer.status == status, await answer.text()
    assert not (tmp_path / name).exists()


async def test_a_bad_manifest_in_the_directory_costs_itself_alone(make: MakeStore, tmp_path: Path) -> None:
    for number in range(NUM_GOOD):
        write_files(tmp_path, make_segment(page_hashes(4, f"{number}"), 0, 4))
    write_files(tmp_path, REPEATED)
    orphan = tmp_path / data_object(b"left by a dead writer")
    orphan.write_bytes(b"left by a dead writer")
    os.utime(orphan, (0, 0))
    store = make(orphan_age_s=60)
    await rebuild(store)
    await store.collect()
    usage = await store.usage()
    assert usage.num_segments == NUM_GOOD
    assert not orphan.exists()
    for number in range(NUM_GOOD):
        assert parts(await store.lookup(FOLDER, page_hashes(4, f"{number}"))) == [(0, 4)]
    assert usage.write_problem is None
    await put_segment(store, make_segment(page_hashes(4, "new"), 0, 4))


async def test_pages_with_the_same_key_are_found_and_forgotten_each(store: LocalStore) -> None:
    one, other = colliding_hashes()
    assert one != other
    assert catalog.page_key(FOLDER, one) == catalog.page_key(FOLDER, other)
    await put_segment(store, COLLIDING)
    for hashes in ([CHAIN[0], one, other, CHAIN[3]], [CHAIN[0], one, other], [one], [other]):
        assert sum(hit.num_pages for hit in (await store.lookup(FOLDER, hashes)).hits) == len(hashes)
    assert (await store.lookup(FOLDER, [CHAIN[0], other])).num_pages == 1
    assert await store.delete(COLLIDING.manifest.key.manifest_name)
    with store._catalog.reading() as db:
        assert db is not None
        assert db.execute("SELECT count(*) FROM pages").fetchone() == (0,)
    await put_segment(store, with_hashes(make_segment(CHAIN, 0, 1), one))
    assert (await store.lookup(FOLDER, [other, CHAIN[1]])).hits == ()
    assert (await store.lookup(FOLDER, [one])).num_pages == 1


async def test_a_manifest_that_the_catalog_refuses_gets_no_name(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take the name of another one."""
    old, refused = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 0, 4, codec="deflate")
    name = old.manifest.key.manifest_name
    await put_segment(store, old)
    _refuse(monkeypatch, refused)
    await store.put(refused.data_name, refused.data)
    with pytest.raises(StoreError, match="refuses") as raised:
        await store.put(name, refused.manifest.encode())
    assert raised.value.reason == "invalid"
    assert (tmp_path / name).read_bytes() == old.manifest.encode()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_a_manifest_that_the_catalog_refuses_ends_no_sweep(
    make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = make_segment(CHAIN, 0, 4)
    _refuse(monkeypatch, refused)
    for number in range(NUM_GOOD):
        write_files(tmp_path, make_segment(page_hashes(4, f"{number}"), 0, 4))
    write_files(tmp_path, refused)
    store = make()
    await rebuild(store)
    assert (await store.usage()).num_segments == NUM_GOOD
    assert (await store.lookup(FOLDER, CHAIN)).hits == ()
    await store.put(refused.data_name, refused.data)  # makes the store look at the manifest again


def _refuse(monkeypatch: pytest.MonkeyPatch, refused: CodedSegment) -> None:
    """Have the catalog refuse one manifest, after it has changed some rows for it. No known manifest is refused."""
    content = refused.manifest.encode()

    def fail(found: bytes) -> str:
        if found == content:
            raise sqlite3.IntegrityError("UNIQUE constraint failed")
        return object_digest(found)

    monkeypatch.setattr(rows, "object_digest", fail)
