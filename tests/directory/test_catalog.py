"""The catalog's tables, manifests that they cannot hold, and a disk or a machine that disturbs them."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec import CodedSegment, Manifest
from sgl_kvfetch.directory import LocalStore, catalog, rows
from sgl_kvfetch.directory.catalog import Catalog, find_pages
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import object_digest
from tests.directory.conftest import MakeStore, rebuild, write_files
from tests.segments import names
from tests.stores.conformance import failing

NUM_PAGES = 16
# Chains that share prefixes of all lengths.
CHAINS = [page_hashes(NUM_PAGES, branch, at) for branch, at in (("", 0), ("b", 3), ("c", 8), ("d", 0), ("e", 15))]
_MANIFEST = make_segment(page_hashes(1), 0, 1).manifest


def of_pages(first_page: int, hashes: Sequence[bytes]) -> Manifest:
    """A manifest without data."""
    return msgspec.structs.replace(_MANIFEST, variants=(), first_page=first_page, page_hashes=tuple(hashes))


def add(db: sqlite3.Connection, manifest: Manifest) -> None:
    name = manifest.key.manifest_name
    if rows.stored_id(db, name) is None:
        rows.add_file(db, name, 1)
    rows.index_segment(db, manifest, name.encode())


def remove(db: sqlite3.Connection, name: str) -> bool:
    file_id = rows.stored_id(db, name)
    if file_id is not None:
        rows.forget_file(db, file_id)
    return file_id is not None


@contextmanager
def tables() -> Iterator[sqlite3.Connection]:
    """The tables of a catalog, without files."""
    with (
        tempfile.TemporaryDirectory() as root,
        closing(Catalog(Path(root), lambda: None)) as opened,
        opened.writing() as db,
    ):
        yield db


def reach(segments: Iterable[Manifest], page_hashes: list[bytes], page: int) -> int:
    """Return how far any segment goes on from a page."""
    best = page
    for manifest in segments:
        if page_hashes[page] in manifest.page_hashes:
            at = manifest.page_hashes.index(page_hashes[page])
            pairs = zip(manifest.page_hashes[at:], page_hashes[page:], strict=False)
            best = max(best, page + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return best


def segment(chain: list[bytes], first: int, length: int) -> Manifest:
    return of_pages(first, chain[first : first + length])


@st.composite
def aligned(draw: st.DrawFn) -> tuple[int, int, int]:
    length = 1 << draw(st.integers(0, 4))
    first = draw(st.integers(0, NUM_PAGES // length - 1)) * length
    return draw(st.integers(0, len(CHAINS) - 1)), first, length


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), aligned()), max_size=40),
    st.integers(0, len(CHAINS) - 1),
    st.integers(0, NUM_PAGES - 1),
    st.integers(1, NUM_PAGES),
)
def test_lookup_matches_the_contract(
    steps: list[tuple[bool, tuple[int, int, int]]], chain: int, first: int, length: int
) -> None:
    model: dict[str, Manifest] = {}
    with tables() as db:
        for keep, (which, start, num_pages) in steps:
            manifest = segment(CHAINS[which], start, num_pages)
            name = manifest.key.manifest_name
            if keep:
                add(db, manifest)
                model[name] = manifest
            else:
                assert remove(db, name) == (model.pop(name, None) is not None)
        assert db.execute("SELECT count(*) FROM segments").fetchone() == (len(model),)
        asked = CHAINS[chain][first : first + length]
        found = find_pages(db, FOLDER, asked)
    page = 0
    for hit in found:
        held = model[hit.manifest_name].page_hashes[hit.first_page : hit.first_page + hit.num_pages]
        assert list(held) == asked[page : page + hit.num_pages]
        assert page + hit.num_pages == reach(model.values(), asked, page)
        page += hit.num_pages
    assert page == len(asked) or reach(model.values(), asked, page) == page


def test_a_manifest_with_a_false_hash_chain_adds_no_wrong_page() -> None:
    chain = CHAINS[0]
    # The right last page, after pages of another prefix, and at another place in the sequence.
    liar = of_pages(8, [*CHAINS[3][:7], chain[7]])
    with tables() as db:
        add(db, segment(chain, 0, 4))
        add(db, liar)
        for first in range(8):
            page = first
            for hit in find_pages(db, FOLDER, chain[first:8]):
                source = list(liar.page_hashes) if hit.manifest_name == liar.key.manifest_name else chain
                assert source[hit.first_page :][: hit.num_pages] == chain[page : page + hit.num_pages]
                page += hit.num_pages


def test_a_popular_prefix_needs_no_linear_search() -> None:
    """Thousands of segments share their first pages, but each lookup checks only a few."""
    chains = [page_hashes(8, str(i), branch_at=4) for i in range(2000)]
    with tables() as db:
        for chain in chains:
            add(db, segment(chain, 0, 8))
        queries: list[str] = []
        db.set_trace_callback(queries.append)
        for chain in chains[::100]:
            assert [hit.num_pages for hit in find_pages(db, FOLDER, chain)] == [8]
        assert len(queries) <= 20 * 8
        db.set_trace_callback(None)
        for chain in chains[:-1]:
            remove(db, segment(chain, 0, 8).key.manifest_name)
        assert [hit.num_pages for hit in find_pages(db, FOLDER, chains[0])] == [4]


CHAIN = page_hashes(4)


def colliding_hashes() -> tuple[bytes, bytes]:
    """Return two page hashes with the same key in every namespace."""
    # Of XXH3's public constants: where the last 16 bytes of an input begin or end with one of them, a product is zero.
    first, second = 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072
    tails = (first, 12345), ((first + 12345 - second) % (1 << 64), second)
    one, other = (bytes(16) + a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in tails)
    return one, other


def with_hashes(segment: CodedSegment, *hashes: bytes) -> CodedSegment:
    return replace(segment, manifest=msgspec.structs.replace(segment.manifest, page_hashes=hashes))


REPEATED = with_hashes(make_segment(CHAIN, 0, 4), CHAIN[0], CHAIN[1], CHAIN[1], CHAIN[3])
COLLIDING = with_hashes(make_segment(CHAIN, 0, 4), CHAIN[0], *colliding_hashes(), CHAIN[3])


async def test_no_manifest_has_a_page_hash_twice(store: LocalStore) -> None:
    await store.put(REPEATED.data_name, REPEATED.data)
    with failing("invalid", "same page hash twice"):
        await store.put(REPEATED.manifest.key.manifest_name, REPEATED.manifest.encode())
    assert await names(store) == {REPEATED.data_name}


async def test_bad_manifests_cost_no_others(make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = make_segment(page_hashes(4, "refused"), 0, 4)
    _refuse(monkeypatch, refused)
    good = [page_hashes(4, f"{number}") for number in range(100)]  # more than a sweep reads in one transaction
    write_files(tmp_path, *(make_segment(chain, 0, 4) for chain in good), REPEATED, refused)
    orphan = tmp_path / data_object(b"left by a dead writer")
    orphan.write_bytes(b"left by a dead writer")
    os.utime(orphan, (0, 0))
    store = make(orphan_age_s=60)
    await rebuild(store)
    await store.collect()
    usage = await store.usage()
    assert (usage.num_segments, usage.write_problem) == (len(good), None)
    assert not orphan.exists()
    for chain in good:
        assert parts(await store.lookup(FOLDER, chain)) == [(0, 4)]
    assert (await store.lookup(FOLDER, refused.manifest.page_hashes)).hits == ()
    await store.put(refused.data_name, refused.data)  # makes the store look at the manifest again
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
    with failing("invalid", "refuses"):
        await store.put(name, refused.manifest.encode())
    assert (tmp_path / name).read_bytes() == old.manifest.encode()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


def _refuse(monkeypatch: pytest.MonkeyPatch, refused: CodedSegment) -> None:
    """Have the catalog refuse one manifest, after it has changed some rows for it. No known manifest is refused."""
    content = refused.manifest.encode()

    def fail(found: bytes) -> str:
        if found == content:
            raise sqlite3.IntegrityError("UNIQUE constraint failed")
        return object_digest(found)

    monkeypatch.setattr(rows, "object_digest", fail)


async def test_a_log_that_may_not_grow_means_a_full_store(make: MakeStore) -> None:
    """As with a quota: SQLite says only that there was an I/O error."""
    store = make()
    await put_segment(store, make_segment(CHAIN, 0, 4))

    async def put_many() -> None:
        for number in range(100):
            await store.put(data_object(bytes([number])), bytes([number]))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))
    try:
        with failing("full", "File too large", retriable=True):
            await put_many()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await store.put(data_object(b"more"), b"more")
    assert (await store.lookup(FOLDER, CHAIN)).num_pages == 4


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("why", ["read-only", "read-only after a kill", "full"])
async def test_a_disk_that_takes_nothing_is_read(tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "kvfetch-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:  # noqa: ASYNC221
        pytest.skip("mounting is not allowed")
    try:
        store = LocalStore(tmp_path / "store")
        await put_segment(store, make_segment(CHAIN, 0, 4))
        kept = {path: path.read_bytes() for path in (tmp_path / "store" / ".catalog").iterdir()}
        await store.close()
        if why == "read-only after a kill":
            for path, content in kept.items():
                path.write_bytes(content)
        if why == "full":
            with suppress(OSError), (tmp_path / "others").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)  # noqa: ASYNC221
        store = LocalStore(tmp_path / "store")
        assert (await store.lookup(FOLDER, CHAIN)).num_pages == 4
        usage = await store.usage()
        assert usage.num_segments == 1
        assert usage.write_problem is not None
        await store.workers.run("upkeep", lambda: None)
        assert len(caplog.records) <= 1  # however often it tries to save when segments were used
        with pytest.raises(StoreError):
            await store.put(data_object(b"new"), b"new")
        if why == "full":
            (tmp_path / "others").unlink()
            await put_segment(store, make_segment(page_hashes(8), 4, 4))
            assert (await store.lookup(FOLDER, page_hashes(8))).num_pages == 8
        await store.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)  # noqa: ASYNC221
