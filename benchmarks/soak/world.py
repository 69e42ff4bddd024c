"""Everything that clients may write: known in advance, so that whatever is read can be compared with it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.heads import make_heads
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.stores.base import SegmentHit
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

_EXACT = make_quantiser("exact")
_GEOMETRY = KVGeometry(num_layers=2, num_heads=2, k_head_dim=64, v_head_dim=64, page_size=64, dtype="bfloat16")
NOISE_HEADS = make_heads(_GEOMETRY, _EXACT)
PAGE_BYTES = _GEOMETRY.page_bytes  # 64 KiB


def noise_values(num_pages: int, seed: int) -> dict[TensorName, torch.Tensor]:
    """Return K and V of random bits, ``(tokens, layers, heads, dim)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_pages * _GEOMETRY.page_size, _GEOMETRY.num_layers, _GEOMETRY.num_heads, _GEOMETRY.k_head_dim
    bits = [torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16) for _ in TENSORS]
    return {tensor: each.view(torch.bfloat16) for tensor, each in zip(TENSORS, bits, strict=True)}


def noise_segment(
    values: dict[TensorName, torch.Tensor],
    page_hashes: Sequence[bytes],
    *,
    first_page: int = 0,
    previous_hash: bytes | None = None,
    span_pages: int = 16,
) -> CodedSegment:
    """Return a segment of these pages. Its data take about ``PAGE_BYTES`` a page."""
    spec = SegmentSpec(NOISE_HEADS, _EXACT, "zstd", "240p", span_pages)
    return encode_segment(spec, values, first_page, previous_hash, page_hashes)


PROMPT_PAGES = 8
_SHARED_PAGES = 4  # the first pages that two prompts have in common
# In pages; every page is in one segment of each. What all clients write at once must fit into the part of the capacity
# that is for data without a manifest.
_LENGTHS = (2, 4, 8)


class WrongError(Exception):
    """The store gave something that nobody wrote."""


@dataclass(frozen=True)
class Version:
    """One encoding of a segment. All of them restore the same values."""

    manifest: bytes
    data_name: str
    data: bytes


@dataclass(frozen=True)
class Segment:
    name: str  # of its manifest
    page_hashes: tuple[bytes, ...]
    versions: tuple[Version, Version]


class World:
    """Prompts of `PROMPT_PAGES` pages, in pairs that begin alike. Each has segments of several lengths, which overlap.

    ``working_set_bytes`` is approximate: pairs are made until their data, one version of each, have this size.
    """

    def __init__(self, working_set_bytes: int, seed: int) -> None:
        self.prompts: list[list[bytes]] = []
        self.segments: dict[str, Segment] = {}
        size = 0
        for pair in itertools.count():
            if size >= working_set_bytes:
                break
            for segment in self._make_pair(pair, seed):
                if segment.name not in self.segments:
                    self.segments[segment.name] = segment
                    size += len(segment.versions[0].data)
        self.working_set_bytes = size
        self._versions = {v.manifest: (segment, v) for segment in self.segments.values() for v in segment.versions}

    def _make_pair(self, pair: int, seed: int) -> Iterator[Segment]:
        for prompt in range(2):
            chain: list[bytes] = []
            for page in range(PROMPT_PAGES):
                content = f"{seed} {pair} {page} {prompt if page >= _SHARED_PAGES else 0}"
                chain.append(hashlib.sha256((chain[-1] if chain else b"") + content.encode()).digest())
            self.prompts.append(chain)
            for length in _LENGTHS:
                for first in range(0, PROMPT_PAGES, length):
                    if prompt == 0 or first + length > _SHARED_PAGES:
                        yield _make_segment(chain, first, length)

    def version_of(self, hit: SegmentHit, asked: Sequence[bytes]) -> Version:
        """Return what a hit has found. ``asked``: the page hashes that were looked up, from the hit's first page on.

        Raises WrongError if nobody wrote this manifest, or if its pages are not those that were looked up.
        """
        known = self._versions.get(hit.manifest)
        if known is None:
            raise WrongError("a lookup returned a manifest that nobody wrote")
        segment, version = known
        pages = segment.page_hashes[hit.first_page : hit.first_page + hit.num_pages]
        if len(pages) < hit.num_pages or pages != tuple(asked[: hit.num_pages]):
            raise WrongError(f"a lookup returned other pages than asked for, in {segment.name}")
        return version


def _make_segment(chain: Sequence[bytes], first_page: int, num_pages: int) -> Segment:
    hashes = chain[first_page : first_page + num_pages]
    values = noise_values(num_pages, seed=int.from_bytes(hashes[-1][:6]))
    previous = chain[first_page - 1] if first_page else None
    versions = []
    for span_pages in (num_pages, num_pages // 2):
        coded = noise_segment(values, hashes, first_page=first_page, previous_hash=previous, span_pages=span_pages)
        versions.append(Version(coded.manifest.encode(), coded.data_name, coded.data))
    one, other = versions
    assert one.data_name != other.data_name
    return Segment(coded.manifest.key.manifest_name, tuple(hashes), (one, other))
