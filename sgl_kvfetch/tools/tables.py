"""Formats summaries as tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby

from rich import box
from rich.table import Table

from sgl_kvfetch.codec import RegionLayout, TileLayout
from sgl_kvfetch.tools.summary import (
    NamespaceSummary,
    PartSummary,
    SegmentSummary,
    StoreSummary,
    VariantSummary,
    layer_range,
)
from sgl_kvfetch.tools.units import format_age, format_ratio, format_size, printable

_MAX_PART_ROWS = 256  # of a variant; a manifest may have 400,000
NAMESPACE_DIGITS, HASH_DIGITS = 12, 16  # enough to be unique, and to use as a prefix of TARGET


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table: columns of text, of which the first never wraps, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def store_tables(label: str, summary: StoreSummary, limit: int) -> Iterator[Table | str]:
    """Yield two tables of namespaces, one of their fields and one of their sizes; then totals and orphans."""
    yield printable(label)
    if summary.namespaces:
        yield _fields_table(summary.namespaces[:limit])
        yield _sizes_table(summary.namespaces[:limit])
        if len(summary.namespaces) > limit:
            yield f"... and {len(summary.namespaces) - limit} more namespaces (--limit)"
    else:
        yield "no segments"
    if len(summary.models) > 1:
        for model, num_bytes in summary.models.items():
            yield f"{format_size(num_bytes)} of {printable(model) or 'namespaces without a readable manifest'}"
    yield f"stored in all: {format_size(summary.stored_bytes)}"
    if summary.num_orphans:
        orphans = f"{summary.num_orphans} data objects ({format_size(summary.orphan_bytes)})"
        yield f"of these, {orphans} have no manifest: still being written, or left by a crash"


def _fields_table(namespaces: Sequence[NamespaceSummary]) -> Table:
    table = make_table(("namespace", "model", "cache", "quantiser", "rank", "newest, oldest"))
    now_s = time.time()
    for summary in namespaces:
        n = summary.namespace
        ages = f"{format_age(now_s - summary.newest_s)}, {format_age(now_s - summary.oldest_s)}"
        if n is None:
            why = "no readable manifest (kvfetch verify says why)"
            table.add_row(summary.digest[:NAMESPACE_DIGITS], why, "", "", "", ages)
            continue
        dims = str(n.k_head_dim) if n.k_head_dim == n.v_head_dim else f"{n.k_head_dim}/{n.v_head_dim}"
        cache = f"{n.attention} {n.kv_dtype}, {n.num_layers} layers x {n.num_heads} heads x {dims}, page {n.page_size}"
        heads = summary.digest.partition(".")[2]
        rank = f"heads {heads}, layers {layer_range(n.first_layer, n.first_layer + n.num_layers)}"
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


def segments_tables(segments: Sequence[SegmentSummary]) -> Iterator[Table | str]:
    """Yield a table per namespace, one row per segment. Namespace and shown name together form a usable prefix."""
    for namespace, group in groupby(segments, key=lambda s: s.manifest_name.partition("/")[0]):
        yield f"{namespace}/"
        yield _segments_table(group)


def _segments_table(segments: Iterable[SegmentSummary]) -> Table:
    table = make_table(("segment", "codecs", "signature"), ("pages", "first page", "tokens", "raw", "stored", "ratio"))
    for s in segments:
        codecs = {codec for v in s.variants for part in v.parts if part.layout for codec in part.codecs}
        num_pages, _, page_hash = s.manifest_name.partition("/")[2].partition("-")
        table.add_row(
            f"{num_pages}-{page_hash[:HASH_DIGITS]}",
            ", ".join(sorted(map(printable, codecs))),
            s.signature,
            str(s.num_pages),
            str(s.first_page),
            str(s.num_tokens),
            format_size(s.sizes.raw_bytes),
            format_size(s.sizes.stored_bytes),
            format_ratio(s.sizes.ratio),
        )
    return table


def segment_tables(s: SegmentSummary) -> Iterator[Table | str]:
    yield s.manifest_name
    yield _facts(s)
    for index, variant in enumerate(s.variants):
        made = f", {printable(variant.codec)} at {printable(variant.resolution)}" if variant.codec else ""
        yield f"variant {index}{made}: {variant.data_name}"
        yield _parts_table(variant)
        if len(variant.parts) > _MAX_PART_ROWS:
            yield f"... {len(variant.parts) - _MAX_PART_ROWS} more parts are in the totals, and shown by --json"
        if variant.missing:
            yield "this variant's data object is MISSING"
    for side in s.sides:
        raw, stored = format_size(side.raw_bytes), format_size(side.stored_bytes)
        yield f"side pool {printable(side.pool)}: {side.num_pages} pages, {raw} raw, {stored} stored"
    raw, stored = format_size(s.sizes.raw_bytes), format_size(s.sizes.stored_bytes)
    ratio = f"{format_ratio(s.sizes.ratio)} smaller, {s.sizes.bits_per_value:.2f} bits a value"
    yield f"against raw: {raw} raw, {stored} stored with scales and manifest: {ratio}"


def _facts(s: SegmentSummary) -> Table:
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
    for field in s.namespace.__slots__:
        table.add_row(field, printable(str(getattr(s.namespace, field))))
    for index, variant in enumerate(s.variants):
        for name, layout in variant.layouts.items():
            table.add_row(f"layout of {name}, variant {index}", _describe_layout(layout))
    table.add_row("manifest", format_size(s.manifest_bytes))
    table.add_row("signature", s.signature)
    if s.expires is not None:
        table.add_row("expires", f"{datetime.fromtimestamp(s.expires, UTC):%Y-%m-%d %H:%M:%S} UTC")
    return table


def _describe_layout(layout: TileLayout | RegionLayout) -> str:
    pictures = f"pictures of {layout.width}x{layout.height}"
    if isinstance(layout, RegionLayout):
        return (
            f"{pictures}, {layout.coefficients_per_frame} coefficients a frame; a region is "
            f"{layout.token_rows}x{layout.token_cols} tokens"
        )
    return (
        f"{pictures}, {layout.tokens_per_frame} tokens a frame; a tile is {layout.head_rows}x{layout.head_cols} heads "
        f"of {layout.dim_rows}x{layout.dim_cols} values"
    )


def _parts_table(variant: VariantSummary) -> Table:
    table = make_table(("layers", "part", "codec"), ("chunks", "stored", "share", "bits/value"))
    total = sum(part.stored_bytes for part in variant.parts)
    for part in variant.parts[:_MAX_PART_ROWS]:
        layers = layer_range(part.first_layer, part.end_layer)
        table.add_row(layers, *_part_cells([part], total), f"{part.bits_per_value:.3f}")
    table.add_section()
    for name in dict.fromkeys(part.part for part in variant.parts):
        alike = [part for part in variant.parts if part.part == name]
        # The mean over layer groups, weighted by their numbers of values.
        num_values = sum(8 * part.stored_bytes / part.bits_per_value for part in alike)
        bits = 8 * sum(part.stored_bytes for part in alike) / num_values
        table.add_row("all", *_part_cells(alike, total), f"{bits:.3f}")
    return table


def _part_cells(parts: Sequence[PartSummary], total_bytes: int) -> tuple[str, ...]:
    stored = sum(part.stored_bytes for part in parts)
    codecs = sorted({printable(codec) for part in parts for codec in part.codecs})
    return (
        parts[0].part,
        ", ".join(codecs),
        str(sum(part.num_chunks for part in parts)),
        format_size(stored),
        f"{stored / total_bytes:.1%}",
    )
