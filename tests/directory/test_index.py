from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings, strategies as st

from harness.small_segments import FOLDER, NAMESPACE, page_hashes
from sgl_kvfetch.directory import catalog as index, rows
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.keys import Namespace, SegmentKey

SPACE = FOLDER
NUM_PAGES = 16
# Chains that share prefixes of all lengths.
CHAINS = [page_hashes(NUM_PAGES, branch, at) for branch, at in (("", 0), ("b", 3), ("c", 8), ("d", 0), ("e", 15))]


@dataclass(frozen=True)
class FakeManifest:
    """What the index reads of a manifest."""

    first_page: int
    page_hashes: tuple[bytes, ...]
    expires: int | None = None
    previous_hash: bytes | None = None
    namespace: Namespace = NAMESPACE
    num_droppable: int = 0
    num_dropped: int = 0

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(SPACE, len(self.page_hashes), self.page_hashes[-1])

    @property
    def data_names(self) -> frozenset[str]:
        return frozenset()

    @property
    def name(self) -> str:
        return self.key.manifest_name


class PageIndex:
    """The tables of a catalog, without files."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def add(self, manifest: FakeManifest) -> None:
        if rows.stored_id(self.db, manifest.name) is None:
            rows.add_file(self.db, manifest.name, 1)
        rows.index_segment(self.db, manifest, manifest.name.encode())  # type: ignore[arg-type]

    def remove(self, name: str) -> bool:
        file_id = rows.stored_id(self.db, name)
        if file_id is None:
            return False
        rows.forget_file(self.db, file_id)
        return True

    def count(self, table: str) -> int:
        return int(self.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def find(self, page_hashes: list[bytes]) -> list[index.IndexHit]:
        return index.find_pages(self.db, SPACE, page_hashes)


@contextmanager
def empty_index() -> Iterator[PageIndex]:
    with tempfile.TemporaryDirectory() as root:
        catalog = Catalog(Path(root), lambda: None)
        try:
            with catalog.writing() as db:
                yield PageIndex(db)
        finally:
            catalog.close()


@dataclass
class Model:
    """A reference implementation of the lookup's contract that checks every segment."""

    segments: dict[str, FakeManifest] = field(default_factory=dict)

    def reach(self, page_hashes: list[bytes], page: int) -> int:
        best = page
        for manifest in self.segments.values():
            if page_hashes[page] in manifest.page_hashes:
                at = manifest.page_hashes.index(page_hashes[page])
                end = page
                for mine, theirs in zip(manifest.page_hashes[at:], page_hashes[page:], strict=False):
                    if mine != theirs:
                        break
                    end += 1
                best = max(best, end)
        return best

    def lookup(self, page_hashes: list[bytes]) -> list[int]:
        lengths, page = [], 0
        while page < len(page_hashes) and (end := self.reach(page_hashes, page)) > page:
            lengths.append(end - page)
            page = end
        return lengths


def segment(chain: list[bytes], first: int, length: int) -> FakeManifest:
    return FakeManifest(first, tuple(chain[first : first + length]))


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
    model = Model()
    with empty_index() as pages:
        for keep, (which, start, num_pages) in steps:
            manifest = segment(CHAINS[which], start, num_pages)
            if keep:
                pages.add(manifest)
                model.segments[manifest.name] = manifest
            else:
                assert pages.remove(manifest.name) == (model.segments.pop(manifest.name, None) is not None)
        assert pages.count("segments") == len(model.segments)
        asked = CHAINS[chain][first : first + length]
        found = pages.find(asked)
    assert [hit.num_pages for hit in found] == model.lookup(asked)
    page = 0
    for hit in found:
        manifest = model.segments[hit.manifest_name]
        held = manifest.page_hashes[hit.first_page : hit.first_page + hit.num_pages]
        assert list(held) == asked[page : page + hit.num_pages]
        page += hit.num_pages


def test_a_manifest_with_a_false_hash_chain_adds_no_wrong_page() -> None:
    chain = CHAINS[0]
    # The right last page, after pages of another prefix, and at another place in the sequence.
    liar = FakeManifest(8, (*CHAINS[3][:7], chain[7]))
    with empty_index() as pages:
        pages.add(segment(chain, 0, 4))
        pages.add(liar)
        for first in range(8):
            page = first
            for hit in pages.find(chain[first:8]):
                source = list(liar.page_hashes) if hit.manifest_name == liar.name else chain
                assert source[hit.first_page :][: hit.num_pages] == chain[page : page + hit.num_pages]
                page += hit.num_pages


def test_a_popular_prefix_needs_no_linear_search() -> None:
    """Thousands of segments share their first pages, but each lookup checks only a few."""
    chains = [page_hashes(8, str(i), branch_at=4) for i in range(2000)]
    with empty_index() as pages:
        for chain in chains:
            pages.add(segment(chain, 0, 8))
        queries: list[str] = []
        pages.db.set_trace_callback(queries.append)
        for chain in chains[::100]:
            assert [hit.num_pages for hit in pages.find(chain)] == [8]
        assert len(queries) <= 20 * 8
        pages.db.set_trace_callback(None)
        for chain in chains[:-1]:
            pages.remove(segment(chain, 0, 8).name)
        assert [hit.num_pages for hit in pages.find(chains[0])] == [4]
