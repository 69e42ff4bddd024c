"""``kvfetch inspect``: show what a store, a segment or a file holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

from rich.table import Table

from sgl_kvfetch.codec import StoreKeys, open_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores import list_profiles, profile_rows
from sgl_kvfetch.stores.upkeep import StoredSegment, read_manifest
from sgl_kvfetch.tools.profiles import profiles_table
from sgl_kvfetch.tools.summary import (
    Inspected,
    NamespaceSummary,
    SegmentSummary,
    VariantSummary,
    summarise_namespaces,
    summarise_segment,
)
from sgl_kvfetch.tools.target import StorePart, run_on_part
from sgl_kvfetch.tools.terminal import (
    KeyFileOption,
    PartArgument,
    StoreAccess,
    format_age,
    format_ratio,
    format_size,
    json_flag,
    make_table,
    option,
    show,
)
from sgl_kvfetch.types import first_to_last

NAMESPACE_DIGITS, HASH_DIGITS = 12, 16  # enough to be unique, and to use as a prefix of STORE


def inspect(
    store: PartArgument,
    access: StoreAccess,
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, json_flag(Inspected)] = False,
    limit: Annotated[int, option("COUNT", "Namespaces or segments to show.", min=1)] = 20,
) -> None:
    """Show what is stored, by namespace or by segment, and how it compares with raw KV.

    For a store, the command lists its namespaces, the largest first, with the ages of their oldest and newest
    segments, and its profiles; for a namespace, its segments; for one segment, all that its manifest says. With
    several models, it also says how many bytes each takes. Sizes include scales and manifests. Segments of a namespace
    that overlap are counted separately. Of encrypted segments, the codecs need --key-file.

    Examples:

        kvfetch inspect http://127.0.0.1:8700

        kvfetch inspect http://127.0.0.1:8700#4f0c

        kvfetch inspect file:///var/cache/kv#4f0c...e1/8-91ab
    """
    keys = StoreKeys.read(key_file)

    async def look(part: StorePart) -> None:
        """Show one segment, the segments of a part of the store, or its namespaces."""
        listed = await part.list_segments()
        whole = [s for s in listed if s.manifest is not None]
        orphans = [info for s in listed if s.manifest is None for info in s.data.values()]
        of_orphans = len(orphans), sum(info.size_bytes for info in orphans)
        if part.prefix:
            segments, unreadable = await _read_segments(part, whole, keys, limit)
            inspected = Inspected([], segments, max(0, len(whole) - limit), unreadable, *of_orphans)
            is_one = len(whole) == len(segments) == 1
            show(inspected, as_json, _segment_tables(segments[0]) if is_one else _segments_tables(inspected))
        else:
            namespaces = await summarise_namespaces(part.store, whole)
            profiles = profile_rows(await list_profiles(part.store), keys)
            inspected = Inspected(namespaces, [], len(whole), {}, *of_orphans, profiles)
            show(inspected, as_json, _store_tables(part.label, inspected, limit))

    run_on_part(store, access, look)


async def _read_segments(
    part: StorePart, segments: Sequence[StoredSegment], keys: StoreKeys, limit: int
) -> tuple[list[SegmentSummary], dict[str, str]]:
    """Summarise the first ``limit`` segments, in each namespace the longest first. Also return errors by name."""
    in_order = sorted(segments, key=lambda s: (s.key.namespace, -s.key.num_pages, s.key.last_page_hash))
    summaries: list[SegmentSummary] = []
    unreadable: dict[str, str] = {}
    for stored in in_order[:limit]:
        name = stored.key.manifest_name
        try:
            manifest = await read_manifest(part.store, name)
            if manifest is None:
                raise StoreError("missing", "it was deleted after it was listed")
            summaries.append(summarise_segment(stored, open_manifest(manifest, keys) if keys else manifest))
        except (FormatError, StoreError) as e:
            if not e.concerns_object:
                raise
            unreadable[name] = str(e)
    return summaries, unreadable


def _store_tables(label: str, inspected: Inspected, limit: int) -> Iterator[Table | str]:
    """Yield two tables of namespaces, one of their fields and one of their sizes; then totals and orphans."""
    namespaces = inspected.namespaces
    yield printable(label)
    if namespaces:
        yield _fields_table(namespaces[:limit])
        yield _sizes_table(namespaces[:limit])
        if len(namespaces) > limit:
            yield f"... and {len(namespaces) - limit} more namespaces (--limit)"
    else:
        yield "no segments"
    if len(inspected.models) > 1:
        for model, num_bytes in inspected.models.items():
            yield f"{format_size(num_bytes)} of {printable(model) or 'namespaces without a readable manifest'}"
    stored_bytes = inspected.orphan_bytes + sum(n.stored_bytes for n in namespaces)
    yield f"stored in all: {format_size(stored_bytes)}"
    yield from _orphan_lines(inspected)
    if inspected.profiles:
        yield profiles_table(inspected.profiles, inspected.stored_by_profile)


def _orphan_lines(inspected: Inspected) -> Iterator[str]:
    if inspected.num_orphans:
        orphans = f"{inspected.num_orphans} data objects ({format_size(inspected.orphan_bytes)})"
        yield f"{orphans} have no manifest: still being written, or left by a crash"


def _fields_table(namespaces: Sequence[NamespaceSummary]) -> Table:
    table = make_table(("namespace", "model", "cache", "quantiser", "rank", "newest, oldest"))
    now_s = time.time()
    for summary in namespaces:
        n = summary.namespace
        ages = f"{format_age(now_s - summary.newest_s)}, {format_age(now_s - summary.oldest_s)}"
        if n is None:
            why = "no readable manifest (kvfetch verify explains why)"
            table.add_row(summary.digest[:NAMESPACE_DIGITS], why, "", "", "", ages)
            continue
        dims = str(n.k_head_dim) if n.k_head_dim == n.v_head_dim else f"{n.k_head_dim}/{n.v_head_dim}"
        cache = f"{n.attention} {n.kv_dtype}, {n.num_layers} layers x {n.num_heads} heads x {dims}, page {n.page_size}"
        heads = first_to_last(*map(int, summary.digest.partition(".")[2].split("-")))
        rank = f"heads {heads}, layers {first_to_last(n.first_layer, n.first_layer + n.num_layers)}"
        row = (summary.digest[:NAMESPACE_DIGITS], summary.model or "", cache, summary.quantiser or "", rank, ages)
        table.add_row(*map(printable, row))
    return table


def _sizes_table(namespaces: Sequence[NamespaceSummary]) -> Table:
    numbers = ("segments", "pages", "tokens", "raw", "stored", "ratio", "bits/value")
    table = make_table(("namespace",), numbers)
    for summary in namespaces:
        found = summary.sizes
        table.add_row(
            summary.digest[:NAMESPACE_DIGITS],
            str(summary.num_segments),
            str(summary.num_pages),
            "-" if summary.num_tokens is None else str(summary.num_tokens),
            format_size(found.raw_bytes) if found else "-",
            format_size(summary.stored_bytes),
            format_ratio(found.ratio if found else None),
            f"{found.bits_per_value:.2f}" if found else "-",
        )
    return table


def _segments_tables(inspected: Inspected) -> Iterator[Table | str]:
    """Yield a table per namespace, one row per segment. Namespace and shown name together form a usable prefix."""
    for namespace, group in groupby(inspected.segments, key=lambda s: s.manifest_name.partition("/")[0]):
        yield f"{namespace}/"
        yield _segments_table(group)
    for name, error in inspected.unreadable.items():
        yield f"{name}: {printable(error)}"
    if inspected.num_more:
        yield f"... and {inspected.num_more} more segments (--limit)"
    yield from _orphan_lines(inspected)


def _segments_table(segments: Iterable[SegmentSummary]) -> Table:
    table = make_table(("segment", "codecs"), ("pages", "first page", "tokens", "raw", "stored", "ratio"))
    for s in segments:
        codecs = {codec for v in s.variants for part in v.parts for codec in part.codecs}
        num_pages, _, page_hash = s.manifest_name.partition("/")[2].partition("-")
        table.add_row(
            f"{num_pages}-{page_hash[:HASH_DIGITS]}",
            ", ".join(sorted(map(printable, codecs))),
            str(s.num_pages),
            str(s.first_page),
            str(s.num_tokens),
            format_size(s.sizes.raw_bytes),
            format_size(s.sizes.stored_bytes),
            format_ratio(s.sizes.ratio),
        )
    return table


def _segment_tables(s: SegmentSummary) -> Iterator[Table | str]:
    """Yield all that is known of one segment."""
    yield s.manifest_name
    yield _facts(s)
    for index, variant in enumerate(s.variants):
        made = f", {printable(variant.codec)} at {printable(variant.resolution)}" if variant.codec else ""
        yield f"variant {index}{made}: {variant.data_name}"
        yield _parts_table(variant)
        if variant.level_bytes or variant.num_dropped_levels:
            levels = ", ".join(map(format_size, variant.level_bytes)) or "none"
            yield f"further levels: {levels}; {variant.num_dropped_levels} were dropped"
        if variant.missing:
            yield "some of this variant's data is MISSING"
    for side in s.sides:
        raw, stored = format_size(side.raw_bytes), format_size(side.stored_bytes)
        yield f"side pool {printable(side.pool)}: {side.num_pages} pages, {raw} raw, {stored} stored"
    raw, stored = format_size(s.sizes.raw_bytes), format_size(s.sizes.stored_bytes)
    ratio = f"{format_ratio(s.sizes.ratio)} smaller, {s.sizes.bits_per_value:.2f} bits per value"
    yield f"against raw: {raw} raw, {stored} stored with scales and manifest: {ratio}"


def _facts(s: SegmentSummary) -> Table:
    """Return a table of what a segment's manifest says, but for its variants."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last_page = s.first_page + s.num_pages - 1
    pages = f"{s.num_pages} pages of {s.namespace.page_size} tokens, from page {s.first_page} to {last_page}"
    table.add_row("holds", f"{s.num_tokens} tokens: {pages}")
    table.add_row("spans", f"{s.num_spans} of up to {s.span_tokens} tokens, {s.num_layer_groups} layer groups")
    for name in ("model", "quantiser"):
        if label := getattr(s.labels, name):
            table.add_row(f"{name}'s label", printable(label))
    if s.labels.writer:
        table.add_row("written by", printable(s.labels.writer))
    for field in s.namespace.__slots__:
        table.add_row(field, printable(str(getattr(s.namespace, field))))
    table.add_row("manifest", format_size(s.manifest_bytes))
    if s.encryption_keys:
        table.add_row("encrypted with", ", ".join(s.encryption_keys))
    if s.expires is not None:
        table.add_row("expires", f"{datetime.fromtimestamp(s.expires, UTC):%Y-%m-%d %H:%M:%S} UTC")
    return table


def _parts_table(variant: VariantSummary) -> Table:
    table = make_table(("part", "codec"), ("chunks", "stored", "share", "bits/value"))
    total = sum(part.stored_bytes for part in variant.parts)
    for part in variant.parts:
        table.add_row(
            printable(part.part),
            ", ".join(map(printable, part.codecs)),
            str(part.num_chunks),
            format_size(part.stored_bytes),
            f"{part.stored_bytes / total:.1%}",
            f"{part.bits_per_value:.3f}",
        )
    return table
