"""Summaries of a store or a segment, in numbers. Sizes count all stored bytes, manifests included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sgl_kvfetch.container.manifest import Cell, Manifest, Variant
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.layout.regions import RegionLayout
from sgl_kvfetch.layout.tiles import TileLayout
from sgl_kvfetch.stores.listing import Objects, StoredSegment, read_manifest
from sgl_kvfetch.types import KV_DTYPES


@dataclass(frozen=True, slots=True)
class Sizes:
    """``ratio`` is raw bytes over stored bytes; ``bits_per_value`` is the stored size of one K or V number."""

    raw_bytes: int
    stored_bytes: int
    ratio: float
    bits_per_value: float


def sizes(raw_bytes: int, stored_bytes: int, dtype: str) -> Sizes:
    num_values = raw_bytes / KV_DTYPES[dtype]
    return Sizes(raw_bytes, stored_bytes, raw_bytes / stored_bytes, 8 * stored_bytes / num_values)


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """Overlapping segments are counted separately. The last three fields are None if no manifest can be read."""

    digest: str
    num_segments: int
    num_pages: int
    stored_bytes: int
    num_tokens: int | None
    sizes: Sizes | None
    namespace: Namespace | None


@dataclass(frozen=True, slots=True)
class StoreSummary:
    namespaces: tuple[NamespaceSummary, ...]
    num_orphans: int  # data objects without a manifest
    orphan_bytes: int

    @property
    def stored_bytes(self) -> int:
        return self.orphan_bytes + sum(n.stored_bytes for n in self.namespaces)


async def summarise_store(objects: Objects, segments: Sequence[StoredSegment]) -> StoreSummary:
    """Summarise a store from object names, sizes and one manifest per namespace, so that large stores stay cheap."""
    orphans = [info for s in segments if s.manifest is None for info in s.data.values()]
    whole = [s for s in segments if s.manifest is not None]
    namespaces = []
    for digest, group in groupby(whole, key=lambda s: s.key.namespace):
        namespaces.append(await _summarise_namespace(objects, digest, list(group)))
    return StoreSummary(tuple(namespaces), len(orphans), sum(info.size_bytes for info in orphans))


async def _summarise_namespace(objects: Objects, digest: str, segments: Sequence[StoredSegment]) -> NamespaceSummary:
    num_pages = sum(s.key.num_pages for s in segments)
    stored_bytes = sum(s.stored_bytes for s in segments)
    manifest = await _first_readable(objects, segments)
    if manifest is None:
        return NamespaceSummary(digest, len(segments), num_pages, stored_bytes, None, None, None)
    geometry = manifest.geometry
    return NamespaceSummary(
        digest,
        len(segments),
        num_pages,
        stored_bytes,
        num_pages * geometry.page_size,
        sizes(num_pages * geometry.page_bytes, stored_bytes, geometry.dtype),
        manifest.namespace,
    )


async def _first_readable(objects: Objects, segments: Iterable[StoredSegment]) -> Manifest | None:
    for segment in segments:
        assert segment.manifest is not None
        try:
            manifest = await read_manifest(objects, segment.manifest.name)
        except FormatError:
            continue  # ``kvfetch verify`` reports those
        if manifest is not None:
            return manifest
    return None


@dataclass(frozen=True, slots=True)
class PartSummary:
    """One layer group's chunks that hold the same part, over all spans and heads. ``bits_per_value`` divides their size
    by the number of all K and V values in the layer group."""

    first_layer: int  # in the model
    end_layer: int
    part: str
    layout: str  # empty if the part holds bytes, not integers
    codecs: tuple[str, ...]
    num_chunks: int
    stored_bytes: int
    bits_per_value: float


@dataclass(frozen=True, slots=True)
class VariantSummary:
    codec: str  # the one that was requested; "" if the writer did not record it
    resolution: str
    data_name: str
    missing: bool
    layouts: dict[str, TileLayout | RegionLayout]
    sizes: Sizes  # this variant and the manifest
    parts: tuple[PartSummary, ...]


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    manifest_name: str
    namespace: Namespace
    first_page: int
    num_pages: int
    num_tokens: int
    num_spans: int
    span_tokens: int
    num_layer_groups: int
    manifest_bytes: int
    sizes: Sizes  # everything under the segment's name
    variants: tuple[VariantSummary, ...]


def summarise_segment(stored: StoredSegment, manifest: Manifest) -> SegmentSummary:
    assert stored.manifest is not None
    variants = tuple(_summarise_variant(stored, manifest, variant) for variant in manifest.variants)
    return SegmentSummary(
        stored.manifest.name,
        manifest.namespace,
        manifest.first_page,
        manifest.num_pages,
        manifest.num_pages * manifest.namespace.page_size,
        manifest.num_spans,
        manifest.span_tokens(0),
        manifest.grid.num_layer_groups,
        stored.manifest.size_bytes,
        sizes(manifest.raw_bytes, stored.stored_bytes, manifest.namespace.kv_dtype),
        variants,
    )


def _summarise_variant(stored: StoredSegment, manifest: Manifest, variant: Variant) -> VariantSummary:
    assert stored.manifest is not None
    name = manifest.data_name(variant)
    stored_bytes = stored.manifest.size_bytes + manifest.data_bytes(variant)
    parts = [
        _summarise_part(manifest, variant, group, index)
        for group in range(manifest.grid.num_layer_groups)
        for index in range(manifest.chunks_per_cell)
    ]
    return VariantSummary(
        variant.codec,
        variant.resolution,
        name,
        name not in stored.data,
        variant.layouts,
        sizes(manifest.raw_bytes, stored_bytes, manifest.namespace.kv_dtype),
        tuple(parts),
    )


def _summarise_part(manifest: Manifest, variant: Variant, layer_group: int, index: int) -> PartSummary:
    cells = [cell for cell in manifest.cells() if cell.layer_group == layer_group]
    chunks = [variant.chunks[manifest.cell_index(cell) * manifest.chunks_per_cell + index] for cell in cells]
    stored_bytes = sum(chunk.size_bytes for chunk in chunks)
    layers, offset = manifest.grid.layers(layer_group), manifest.namespace.first_layer
    return PartSummary(
        offset + layers.start,
        offset + layers.stop,
        manifest.parts[index].name,
        manifest.parts[index].layout,
        tuple(sorted({chunk.codec for chunk in chunks})),
        len(chunks),
        stored_bytes,
        8 * stored_bytes / sum(map(manifest.cell_values, cells)),
    )


def layers_of(manifest: Manifest, cell: Cell) -> str:
    """Return a cell's layers as text, with the model's layer numbers."""
    layers, offset = manifest.grid.layers(cell.layer_group), manifest.namespace.first_layer
    return layer_range(offset + layers.start, offset + layers.stop)


def layer_range(first: int, end: int) -> str:
    return f"{first}-{end - 1}" if end - first > 1 else str(first)
