"""Summarises a store or its segments in numbers, for `kvfetch inspect`. Sizes include manifests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Struct

from sgl_kvfetch.codec import Manifest, Variant
from sgl_kvfetch.keys import Labels, Namespace, profile_digest
from sgl_kvfetch.stores import AdminStore, ProfileRow
from sgl_kvfetch.stores.upkeep import StoredSegment, first_readable_manifest
from sgl_kvfetch.types import KV_DTYPES


class Sizes(Struct, frozen=True):
    """``ratio`` is raw bytes over stored bytes; ``bits_per_value`` is the stored size of one K or V number."""

    raw_bytes: int
    stored_bytes: int
    ratio: float
    bits_per_value: float


def sizes(raw_bytes: int, stored_bytes: int, dtype: str) -> Sizes:
    num_values = raw_bytes / KV_DTYPES[dtype]
    return Sizes(raw_bytes, stored_bytes, raw_bytes / stored_bytes, 8 * stored_bytes / num_values)


class NamespaceSummary(Struct, frozen=True):
    """Counts of one namespace; overlapping segments count separately. Without a readable manifest, fields from
    ``num_tokens`` on are None. ``model``, ``quantiser`` and ``flags`` are names for people, from the newest segment's
    labels."""

    digest: str
    num_segments: int
    num_pages: int
    stored_bytes: int
    oldest_s: float  # when its oldest manifest was put, in seconds since the epoch
    newest_s: float
    num_tokens: int | None
    sizes: Sizes | None
    namespace: Namespace | None
    model: str | None
    quantiser: str | None
    flags: str | None


async def summarise_namespaces(store: AdminStore, segments: Sequence[StoredSegment]) -> list[NamespaceSummary]:
    """Summarise namespaces, the one that takes most bytes first.

    Reads one manifest of each namespace, so that large stores stay cheap. ``segments`` are whole, and sorted by name.
    """
    groups = [list(group) for _, group in groupby(segments, key=lambda s: s.key.namespace)]
    namespaces = [await _summarise_namespace(store, group) for group in groups]
    return sorted(namespaces, key=lambda n: n.stored_bytes, reverse=True)


async def _summarise_namespace(store: AdminStore, segments: Sequence[StoredSegment]) -> NamespaceSummary:
    num_pages = sum(s.key.num_pages for s in segments)
    stored_bytes = sum(s.stored_bytes for s in segments)
    times_s = [s.manifest.modified_s for s in segments if s.manifest is not None]
    known = (segments[0].key.namespace, len(segments), num_pages, stored_bytes, min(times_s), max(times_s))
    newest_first = sorted(segments, key=lambda segment: segment.modified_s, reverse=True)
    manifest = await first_readable_manifest(store, newest_first)
    if manifest is None:
        return NamespaceSummary(*known, None, None, None, None, None, None)
    geometry = manifest.geometry
    return NamespaceSummary(
        *known,
        num_pages * geometry.page_size,
        sizes(num_pages * geometry.page_bytes, stored_bytes, geometry.dtype),
        manifest.namespace,
        manifest.labels.model_name(manifest.namespace.model),
        manifest.labels.quantiser_name(manifest.namespace.quantiser),
        manifest.labels.flags,
    )


class PartSummary(Struct, frozen=True):
    """The chunks that hold the same part, of all spans, layers and heads. ``bits_per_value`` divides their size by the
    number of all K and V values of the segment."""

    part: str
    codecs: tuple[str, ...]
    num_chunks: int
    stored_bytes: int
    bits_per_value: float


class VariantSummary(Struct, frozen=True):
    codec: str  # the one that was requested; "" if the writer did not record it
    resolution: str
    data_name: str
    missing: bool
    sizes: Sizes  # this variant and the manifest
    parts: tuple[PartSummary, ...]
    level_bytes: tuple[int, ...] = ()  # of each level after the first
    num_dropped_levels: int = 0


class SideSummary(Struct, frozen=True):
    """The pages of one side pool."""

    pool: str
    num_pages: int
    raw_bytes: int
    stored_bytes: int


class SegmentSummary(Struct, frozen=True):
    manifest_name: str
    namespace: Namespace
    labels: Labels
    first_page: int
    num_pages: int
    num_tokens: int
    num_spans: int
    span_tokens: int
    num_layer_groups: int
    manifest_bytes: int
    encryption_keys: list[str]  # ids; empty if it is not encrypted
    expires: int | None  # in seconds since the epoch; None for never
    sizes: Sizes  # everything under the segment's name
    variants: tuple[VariantSummary, ...]
    sides: tuple[SideSummary, ...]


class Inspected(Struct, frozen=True):
    """The result of `kvfetch inspect`: the namespaces of a whole store, or the segments of a part of it."""

    namespaces: list[NamespaceSummary]
    segments: list[SegmentSummary]
    num_more: int  # segments that were not summarised
    unreadable: dict[str, str]  # errors by the manifest's name
    num_orphans: int  # data objects without a manifest
    orphan_bytes: int
    profiles: list[ProfileRow] = []  # of a whole store, the newest first

    @property
    def stored_by_profile(self) -> dict[str, int]:
        """Stored bytes by the digest of the profile that they need."""
        totals: dict[str, int] = {}
        for n in self.namespaces:
            if n.namespace is not None and (digest := profile_digest(n.namespace.quantiser)) is not None:
                totals[digest] = totals.get(digest, 0) + n.stored_bytes
        return totals

    @property
    def models(self) -> dict[str, int]:
        """Stored bytes by model, the largest first; "" for namespaces without a readable manifest."""
        totals: dict[str, int] = {}
        for n in self.namespaces:
            model = n.model or ""
            totals[model] = totals.get(model, 0) + n.stored_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def summarise_segment(stored: StoredSegment, manifest: Manifest) -> SegmentSummary:
    """Return what `inspect` and the page show of a segment."""
    assert stored.manifest is not None
    variants = tuple(_summarise_variant(stored, manifest, variant) for variant in manifest.variants)
    return SegmentSummary(
        stored.manifest.name,
        manifest.namespace,
        manifest.labels,
        manifest.first_page,
        manifest.num_pages,
        manifest.num_pages * manifest.namespace.page_size,
        manifest.num_spans,
        manifest.span_tokens(0),
        manifest.grid.num_layer_groups,
        stored.manifest.size_bytes,
        manifest.key_ids,
        manifest.expires,
        sizes(manifest.raw_bytes, stored.stored_bytes, manifest.namespace.kv_dtype),
        variants,
        tuple(_summarise_sides(manifest)),
    )


def _summarise_sides(manifest: Manifest) -> Iterator[SideSummary]:
    pages = [page for side in manifest.sides for page in side.pages]
    for pool in sorted({page.pool for page in pages}):
        theirs = [page for page in pages if page.pool == pool]
        raw_bytes, stored_bytes = (sum(getattr(x, field) for x in theirs) for field in ("num_bytes", "size_bytes"))
        yield SideSummary(pool, len(theirs), raw_bytes, stored_bytes)


def _summarise_variant(stored: StoredSegment, manifest: Manifest, variant: Variant) -> VariantSummary:
    """Return sizes and parts of a variant, and whether some of its data are missing."""
    assert stored.manifest is not None
    name = manifest.data_name(variant)
    stored_bytes = stored.manifest.size_bytes + sum(each.size_bytes for each in variant.objects)
    return VariantSummary(
        variant.codec,
        variant.resolution,
        name,
        any(manifest.data_name(each) not in stored.data for each in variant.objects),
        sizes(manifest.kv_bytes, stored_bytes, manifest.namespace.kv_dtype),
        tuple(_summarise_part(manifest, variant, index) for index in range(manifest.chunks_per_cell)),
        tuple(level.size_bytes for level in variant.levels),
        variant.num_dropped,
    )


def _summarise_part(manifest: Manifest, variant: Variant, index: int) -> PartSummary:
    """Return what one part takes in a variant. Each cell has a chunk of it."""
    geometry, chunks = manifest.geometry, variant.chunks[index :: manifest.chunks_per_cell]
    stored_bytes = sum(chunk.size_bytes for chunk in chunks)
    num_tokens, num_layers = manifest.num_pages * geometry.page_size, manifest.namespace.num_layers
    num_values = num_tokens * num_layers * manifest.num_heads * (geometry.k_head_dim + geometry.v_head_dim)
    codecs = tuple(sorted({chunk.codec for chunk in chunks}))
    return PartSummary(manifest.parts[index].name, codecs, len(chunks), stored_bytes, 8 * stored_bytes / num_values)
