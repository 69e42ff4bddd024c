from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from hypothesis import given, settings, strategies as st

from harness.small_segments import FOLDER, make_segment, page_hashes
from sgl_kvfetch.codec.container.manifest import Manifest
from sgl_kvfetch.directory import catalog as index, rows
from sgl_kvfetch.directory.catalog import Catalog

NUM_PAGES = 16
# Chains that share prefixes of all lengths.
CHAINS = [page_hashes(NUM_PAGES, branch, at) for branch, at in (("", 0), ("b", 3), ("c", 8), ("d", 0), ("e", 15))]


_MANIFEST = make_segment(page_hashes(1), 0, 1).manifest


def of_pages(first_page: int, hashes: Sequence[bytes]) -> Manifest:
    """A manifest without data."""
    return msgspec.structs.replace(_MANIFEST, variants=(), first_page=first_page, page_hashes=tuple(hashes))


class PageIndex:
    """The tables of a catalog, without files."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def add(self, manifest: Manifest) -> None:
        name = manifest.key.manifest_name
        if rows.stored_id(self.db, name) is None:
            rows.add_file(self.db, name, 1)
        rows.index_segment(self.db, manifest, name.encode())

    def remove(self, name: str) -> bool:
        file_id = rows.stored_id(self.db, name)
        if file_id is not None:
            rows.forget_file(self.db, file_id)
        return file_id is not None

    def find(self, page_hashes: list[bytes]) -> list[index.IndexHit]:
        return index.find_pages(self.db, FOLDER, page_hashes)


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

    segments: dict[str, Manifest] = field(default_factory=dict)

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
    model = Model()
    with empty_index() as pages:
        for keep, (which, start, num_pages) in steps:
            manifest = segment(CHAINS[which], start, num_pages)
            if keep:
                pages.add(manifest)
                model.segments[manifest.key.manifest_name] = manifest
            else:
                assert pages.remove(manifest.key.manifest_name) == (
                    model.segments.pop(manifest.key.manifest_name, None) is not None
                )
        assert pages.db.execute("SELECT count(*) FROM segments").fetchone() == (len(model.segments),)
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
    liar = of_pages(8, [*CHAINS[3][:7], chain[7]])
    with empty_index() as pages:
        pages.add(segment(chain, 0, 4))
        pages.add(liar)
        for first in range(8):
            page = first
            for hit in pages.find(chain[first:8]):
                source = list(liar.page_hashes) if hit.manifest_name == liar.key.manifest_name else chain
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
            pages.remove(segment(chain, 0, 8).key.manifest_name)
        assert [hit.num_pages for hit in pages.find(chains[0])] == [4]
