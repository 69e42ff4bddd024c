"""Small real segments, of one layer and head, to test stores with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import msgspec
import torch
import xxhash

from sgl_kvfetch.codec import CodedSegment, SegmentSpec, secure_segment
from sgl_kvfetch.codec.container.segment import encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace, SegmentKey
from sgl_kvfetch.stores import Lookup, Store

NAMESPACE = Namespace(
    model="conformance",
    model_dtype="bfloat16",
    attention="mha",
    kv_dtype="bfloat16",
    page_size=1,
    num_layers=1,
    first_layer=0,
    num_heads=1,
    k_head_dim=48,
    v_head_dim=48,
    quantiser="exact",
)


def head_slice(model: str) -> HeadSlice:
    return HeadSlice(replace(NAMESPACE, model=model), range(1))


FOLDER = head_slice(NAMESPACE.model).folder


def page_hashes(num_pages: int, branch: str = "", branch_at: int = 0) -> list[bytes]:
    """Return a chain of page hashes, which depend on ``branch`` from page ``branch_at`` on."""
    chain, last = [], b""
    for page in range(num_pages):
        content = f"{page}{branch if page >= branch_at else ''}"
        last = hashlib.sha256(last + content.encode()).digest()
        chain.append(last)
    return chain


@cache
def _coded(
    model: str, first_page: int, previous: bytes | None, hashes: tuple[bytes, ...], codec: str, content: int
) -> CodedSegment:
    spec = SegmentSpec(head_slice(model), make_quantiser("exact"), codec, "240p", 8)
    shape = (len(hashes), 1, 1, 48)
    generator = torch.Generator().manual_seed(content)
    values = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return encode_segment(spec, {"k": values, "v": -values}, first_page, previous, list(hashes))


def make_segment(
    chain: Sequence[bytes],
    first_page: int,
    num_pages: int,
    *,
    model: str = "conformance",
    codec: str = "zstd",
    content: int = 0,
) -> CodedSegment:
    """Return a small real segment of pages ``[first_page, first_page + num_pages)``. ``content`` seeds its values."""
    previous = chain[first_page - 1] if first_page else None
    return _coded(model, first_page, previous, tuple(chain[first_page : first_page + num_pages]), codec, content)


def expiring(segment: CodedSegment, expires: float | None) -> CodedSegment:
    """Return the segment with a time from which on it has expired, in seconds since the epoch; None for never."""
    manifest = msgspec.structs.replace(segment.manifest, expires=None if expires is None else int(expires))
    return replace(segment, manifest=manifest)


async def put_segment(store: Store, segment: CodedSegment) -> None:
    """Put a segment as a writer does: the data, then the manifest."""
    if store.keys:
        segment = secure_segment(segment, store.keys)
    for name, data in segment.data_objects():
        await store.put(name, data)
    await store.put(segment.manifest.key.manifest_name, segment.manifest.encode())


def data_object(content: bytes, heads: str = "0-1") -> str:
    """Return a name for a data object with this content. Its segment has no manifest."""
    folder = f"{FOLDER.partition('.')[0]}.{heads}"
    key = SegmentKey(folder, 1, hashlib.sha256(content).digest())
    return key.data_name(xxhash.xxh3_128_hexdigest(content))


def parts(found: Lookup) -> list[tuple[int, int]]:
    return [(hit.first_page, hit.num_pages) for hit in found.hits]
