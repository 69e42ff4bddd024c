from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvfetch.container.manifest import Manifest
from sgl_kvfetch.stores.index import PageIndex
from sgl_kvfetch.testing.small_segments import FOLDER, page_hashes

SPACE = FOLDER
NUM_PAGES = 16
# Chains that share prefixes of all lengths.
CHAINS = [page_hashes(NUM_PAGES, branch, at) for branch, at in (("", 0), ("b", 3), ("c", 8), ("d", 0), ("e", 15))]


@dataclass(frozen=True)
class FakeManifest:
    """The two fields that an index reads."""

    first_page: int
    page_hashes: tuple[bytes, ...]


@dataclass
class Model:
    """A reference implementation of the lookup's contract that checks every segment."""

    segments: dict[str, tuple[bytes, FakeManifest]] = field(default_factory=dict)

    def reach(self, page_hashes: list[bytes], page: int) -> int:
        best = page
        for _, manifest in self.segments.values():
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


def segment(chain: list[bytes], first: int, length: int) -> tuple[str, bytes, FakeManifest]:
    manifest = FakeManifest(first, tuple(chain[first : first + length]))
    name = f"{SPACE}/{length}-{manifest.page_hashes[-1].hex()}.kvm"
    return name, name.encode(), manifest


def add(index: PageIndex, chain: list[bytes], first: int, length: int) -> str:
    name, content, manifest = segment(chain, first, length)
    index.add(name, content, cast(Manifest, manifest))
    return name


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
    index, model = PageIndex(), Model()
    for keep, (which, start, num_pages) in steps:
        name, content, manifest = segment(CHAINS[which], start, num_pages)
        if keep:
            index.add(name, content, cast(Manifest, manifest))
            model.segments[name] = content, manifest
        else:
            assert index.remove(name) == (model.segments.pop(name, None) is not None)
    assert len(index) == len(model.segments)
    asked = CHAINS[chain][first : first + length]
    found = index.lookup(SPACE, asked)
    assert [hit.num_pages for hit in found.hits] == model.lookup(asked)
    page = 0
    for name, hit in index.find(SPACE, asked):
        content, manifest = model.segments[name]
        assert hit.manifest == content
        pages = manifest.page_hashes[hit.first_page : hit.first_page + hit.num_pages]
        assert list(pages) == asked[page : page + hit.num_pages]
        page += hit.num_pages


def test_removing_everything_leaves_nothing() -> None:
    index = PageIndex()
    names = {add(index, chain, 0, length) for chain in CHAINS for length in (1, 4, 16)}
    for name in names:
        assert name in index
        assert index.remove(name)
    assert len(index) == 0
    assert index._spaces == {}


def test_a_manifest_with_a_false_hash_chain_adds_no_wrong_page() -> None:
    chain = CHAINS[0]
    index = PageIndex()
    add(index, chain, 0, 4)
    # The right last page, after pages of another prefix, and at another place in the sequence.
    liar = FakeManifest(8, (*CHAINS[3][:7], chain[7]))
    index.add(f"{SPACE}/liar", b"liar", cast(Manifest, liar))
    for first in range(8):
        page = first
        for _, hit in index.find(SPACE, chain[first:8]):
            source = liar.page_hashes if hit.manifest == b"liar" else chain
            assert list(source[hit.first_page :][: hit.num_pages]) == chain[page : page + hit.num_pages]
            page += hit.num_pages


def test_a_match_across_two_hashes_is_no_page() -> None:
    inner = page_hashes(1)[0]
    straddling = (b"\x00" * 16 + inner[:16], inner[16:] + b"\x00" * 16, inner, b"\x01" * 32)
    index = PageIndex()
    index.add(f"{SPACE}/x", b"x", cast(Manifest, FakeManifest(0, straddling)))
    (hit,) = index.lookup(SPACE, [inner]).hits
    assert (hit.first_page, hit.num_pages) == (2, 1)


def test_a_popular_prefix_needs_no_linear_search() -> None:
    """Thousands of segments share their first pages, but each lookup checks only a few."""
    index = PageIndex()
    chains = [page_hashes(8, str(i), branch_at=4) for i in range(2000)]
    for chain in chains:
        add(index, chain, 0, 8)
    for chain in chains[::100]:
        assert [hit.num_pages for hit in index.lookup(SPACE, chain).hits] == [8]
    for chain in chains[:-1]:
        index.remove(f"{SPACE}/8-{chain[-1].hex()}.kvm")
    assert [hit.num_pages for hit in index.lookup(SPACE, chains[0]).hits] == [4]
