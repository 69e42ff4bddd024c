"""Small segments for tests of everything that reads or writes them."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec
import torch
import xxhash

from harness.small_segments import put_segment
from sgl_kvfetch.codec.container.objects import Side
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import FORMAT_MAJOR, FORMAT_MINOR, HeadSlice, Labels, Namespace
from sgl_kvfetch.stores.base import AdminStore, Store
from sgl_kvfetch.types import TENSORS, CellGrid, KVGeometry, TensorName, torch_dtype

S = TypeVar("S", bound=Store)
T = TypeVar("T")
SMALL = KVGeometry(num_layers=4, num_heads=2, k_head_dim=48, v_head_dim=64, page_size=4, dtype="bfloat16")


def using(store: S, work: Callable[[S], Awaitable[T]]) -> T:
    """Open a store for some work, from code that is not asynchronous. Return what the work returns."""

    async def run() -> T:
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def put_all(store: Store, *segments: CodedSegment) -> None:
    async def put(store: Store) -> None:
        for segment in segments:
            await put_segment(store, segment)

    using(store, put)


async def names(store: AdminStore) -> set[str]:
    """Return the names of all objects."""
    return {info.name async for info in store.list()}


def make_heads(geometry: KVGeometry = SMALL, quantiser: Quantiser | None = None, model: str = "m") -> HeadSlice:
    """All heads of a model of this shape."""
    namespace = Namespace(
        model=model,
        model_dtype="dtype=auto",
        attention="mha",
        kv_dtype=geometry.dtype,
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        first_layer=0,
        num_heads=geometry.num_heads,
        k_head_dim=geometry.k_head_dim,
        v_head_dim=geometry.v_head_dim,
        quantiser=(quantiser or make_quantiser("exact")).identity,
    )
    return HeadSlice(namespace, range(geometry.num_heads))


def page_hashes(num_pages: int, seed: str = "", first_page: int = 0) -> list[bytes]:
    """Chained, as SGLang's are: equal hashes mean an equal prefix."""
    chain = [hashlib.sha256(seed.encode()).digest()]
    for page in range(first_page + num_pages):
        chain.append(hashlib.sha256(chain[-1] + bytes([page & 255])).digest())
    return chain[1 + first_page :]


def make_values(geometry: KVGeometry, num_pages: int, seed: int = 0) -> dict[TensorName, torch.Tensor]:
    """K and V, ``(tokens, layers, heads, dim)``, that vary slowly along the tokens as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[TensorName, torch.Tensor] = {}
    for tensor in TENSORS:
        shape = (num_pages * geometry.page_size, geometry.num_layers, geometry.num_heads, geometry.head_dim(tensor))
        drift = torch.randn(shape, generator=generator).cumsum(0) * 0.1
        offset = torch.randn((1, *shape[1:]), generator=generator)
        values[tensor] = (drift + offset).to(torch_dtype(geometry.dtype))
    return values


def there_and_back(quantiser: Quantiser, values: Mapping[TensorName, torch.Tensor]) -> dict[TensorName, torch.Tensor]:
    """All layers' and heads' values quantised and restored, ``(tokens, layers, heads, dim)``."""
    num_tokens, num_layers, num_heads, _ = values["k"].shape
    exact = CellValues(values["k"], values["v"])
    restored = CellValues(*map(torch.empty_like, exact))
    grid = CellGrid(num_layers, num_heads, quantiser.cell_layers, quantiser.cell_heads or num_heads)
    for group, block in grid.cells():
        place = CellPlace(grid.layers(group), grid.heads(block), range(num_tokens))
        quantised = quantiser.quantise(exact.cell(place.layers, place.heads), place)
        back = quantiser.dequantise(quantised, exact.k.dtype, place)
        for whole, part in zip(restored.cell(place.layers, place.heads), back, strict=True):
            whole.copy_(part)
    return dict(zip(TENSORS, restored, strict=True))


def with_side(segment: CodedSegment, side: Side, data: bytes) -> CodedSegment:
    """Return the segment with one more object of side pages."""
    manifest = msgspec.structs.replace(segment.manifest, sides=(*segment.manifest.sides, side))
    return replace(segment, manifest=manifest, side_data=(*segment.side_data, data))


def with_labels(segment: CodedSegment, labels: Labels) -> CodedSegment:
    return replace(segment, manifest=msgspec.structs.replace(segment.manifest, labels=labels))


def as_newer(manifest: bytes, later: bytes = b"\x01") -> bytes:
    """The manifest with a field of a later minor version, whose value is given in MessagePack."""
    packed = msgspec.msgpack.encode(msgspec.msgpack.decode(manifest[12:-16]) | {"later": msgspec.Raw(later)})
    head = struct.pack("<4sHHI", b"KVFM", FORMAT_MAJOR, FORMAT_MINOR + 1, len(packed)) + packed
    return head + xxhash.xxh3_128_digest(head)


def make_segment(
    geometry: KVGeometry = SMALL,
    num_pages: int = 4,
    *,
    quantiser: Quantiser | None = None,
    codec: str = "zstd",
    first_page: int = 0,
    span_pages: int = 2,
    seed: str = "",
    model: str = "m",
    values: dict[TensorName, torch.Tensor] | None = None,
    heads: range | None = None,
    cell_heads: int | None = None,
    resolution: str = "240p",
) -> tuple[CodedSegment, dict[TensorName, torch.Tensor]]:
    """A segment of the model's ``heads``, by default of all, with the values of all heads of its pages."""
    quantiser = quantiser or make_quantiser("exact")
    values = make_values(geometry, num_pages) if values is None else values
    whole = make_heads(geometry, quantiser, model)
    part = HeadSlice(whole.namespace, whole.heads if heads is None else heads)
    spec = SegmentSpec(part, quantiser, codec, resolution, span_pages, cell_heads=cell_heads)
    hashes = page_hashes(num_pages, seed, first_page)
    previous = page_hashes(1, seed, first_page - 1)[0] if first_page else None
    own = {t: x[:, :, part.heads.start : part.heads.stop] for t, x in values.items()}
    return encode_segment(spec, own, first_page, previous, hashes), values
