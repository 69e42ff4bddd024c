"""Merge two neighbouring segments into one of twice the length, without changing a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import msgspec
import xxhash

from sgl_kvfetch.codec.bitstream.ans import joined
from sgl_kvfetch.codec.container.manifest import Cell, Manifest
from sgl_kvfetch.codec.container.objects import Level, Variant
from sgl_kvfetch.codec.container.reader import SegmentReader, first_readable
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_cells
from sgl_kvfetch.codec.container.sides import join_sides
from sgl_kvfetch.codec.quant.base import Quantised, join_parts
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import Labels


def merge_segments(
    spec: SegmentSpec, left: CodedSegment, right: CodedSegment, executor: Executor | None = None
) -> CodedSegment:
    """Return the segment that covers ``left`` and ``right``. They must be buddies: neighbours of equal length that
    together are aligned.

    If their spans are already as long as the writer's, chunks are copied unchanged, in the variants that both have.
    Otherwise they are decoded, joined and encoded as the writer does; integers and bytes stay the same. Everything
    decoded is verified by its checksum. Side pages are copied unchanged. The merged segment expires when the first of
    the two does. Raises FormatError and CorruptError.
    """
    a, b = left.manifest, right.manifest
    follows = b.first_page == a.first_page + a.num_pages and b.previous_hash == a.page_hashes[-1]
    if _grid_of(a) != _grid_of(b) or a.num_pages != b.num_pages or not follows:
        raise FormatError(f"segments {a.key.stem} and {b.key.stem} are not neighbours of equal length and format")
    if a.first_page % (2 * a.num_pages):
        raise FormatError(f"segments at page {a.first_page} of {a.num_pages} pages are not buddies")
    if a.span_pages == b.span_pages == spec.span_pages and a.num_pages % a.span_pages == 0:
        pairs = _common_variants(a, b)
        if pairs:
            return _with_sides(_joined(left, right, pairs), left, right)

    spec = replace(spec, cell_heads=a.cell_heads)  # joining changes only a cell's tokens
    halves = [_reader_and_data(spec, segment) for segment in (left, right)]
    lost, also_lost = (reader.coarseness for reader, _ in halves)
    if lost != also_lost or lost >= spec.num_levels:
        raise FormatError(
            f"of {spec.num_levels} levels, {a.key.stem} has lost {lost}, {b.key.stem} {also_lost}: they are not merged"
        )
    spec = replace(spec, num_dropped=lost)
    manifest = spec.manifest(a.first_page, a.previous_hash, a.page_hashes + b.page_hashes)
    labels = _labels_of_both(manifest, a, b)
    manifest = msgspec.structs.replace(manifest, expires=_earlier_expiry(a, b), labels=labels)
    parts = spec.quantiser.parts(a.geometry.torch_dtype)

    def joined_cell(cell: Cell) -> Quantised:
        """Join a merged span from the halves' spans. It holds a whole number of them, from its own first page on."""
        first_page, end_page = manifest.span_range(cell.span)
        pieces = []
        for half, (reader, data) in enumerate(halves):
            for span in range(reader.manifest.num_spans):
                first, end = (page + half * a.num_pages for page in reader.manifest.span_range(span))
                if first_page < end and first < end_page:
                    if first < first_page or end > end_page:
                        raise FormatError(f"a span of {reader.manifest.key.stem} crosses the end of a merged span")
                    part = cell._replace(span=span)
                    pieces.append(reader.decode_cell(part, reader.chunks_in(part, data)))
        return join_parts(parts, pieces)

    return _with_sides(encode_cells(spec, manifest, joined_cell, executor).joined(), left, right)


def _with_sides(whole: CodedSegment, left: CodedSegment, right: CodedSegment) -> CodedSegment:
    halves = ((0, left), (left.manifest.num_pages, right))
    side = join_sides(
        (first_page, zip(half.manifest.sides, half.side_data, strict=True)) for first_page, half in halves
    )
    return whole if side is None else whole.with_side(*side)


def _earlier_expiry(a: Manifest, b: Manifest) -> int | None:
    return min((m.expires for m in (a, b) if m.expires is not None), default=None)


def _labels_of_both(whole: Manifest, a: Manifest, b: Manifest) -> Labels:
    """Return the labels of ``whole``, and the writer of both halves, if it is one."""
    writer = a.labels.writer if a.labels.writer == b.labels.writer else ""
    return msgspec.structs.replace(whole.labels, writer=writer)


def _grid_of(manifest: Manifest) -> tuple[object, ...]:
    """Return the properties that both segments must share to be merged."""
    m = manifest
    return m.namespace, m.first_head, m.num_heads, m.cell_layers, m.cell_heads, m.parts, m.coefficients


def _reader_and_data(spec: SegmentSpec, segment: CodedSegment) -> tuple[SegmentReader, list[bytes]]:
    variant = first_readable(segment.manifest)
    reader = SegmentReader(segment.manifest, spec.quantiser, variant)
    return reader, [segment.variant_data(variant), *segment.levels_of(variant)]


def _common_variants(a: Manifest, b: Manifest) -> list[tuple[int, int]]:
    """Return the variants that both have with equal codec, resolution and layouts, as pairs of indices; failing that,
    one pair with equal layouts."""

    def pairs(kind: Callable[[Variant], object]) -> list[tuple[int, int]]:
        theirs = list(map(kind, b.variants))
        return [(i, theirs.index(kind(x))) for i, x in enumerate(a.variants) if kind(x) in theirs]

    return (
        pairs(lambda x: (x.codec, x.resolution, x.layouts, len(x.levels), x.num_dropped))
        or pairs(lambda x: (x.layouts, len(x.levels), x.num_dropped))[:1]
    )


def _joined(left: CodedSegment, right: CodedSegment, pairs: Sequence[tuple[int, int]]) -> CodedSegment:
    """Concatenate these pairs of variants, chunks unchanged."""
    a, b = left.manifest, right.manifest
    variants: list[Variant] = []
    contents: list[bytes] = []
    level_data: list[bytes] = []
    for i, j in pairs:
        x, y = a.variants[i], b.variants[j]
        data = joined((left.variant_data(i), right.variant_data(j)))
        levels = [joined((p, q)) for p, q in zip(left.levels_of(i), right.levels_of(j), strict=True)]
        level_data += levels
        variants.append(
            msgspec.structs.replace(
                x,
                data_digest=xxhash.xxh3_128_hexdigest(data),
                chunks=x.chunks + y.chunks,
                levels=tuple(
                    Level(xxhash.xxh3_128_hexdigest(both), p.chunks + q.chunks)
                    for p, q, both in zip(x.levels, y.levels, levels, strict=True)
                ),
                codec=x.codec if x.codec == y.codec else "",
                resolution=x.resolution if x.resolution == y.resolution else "",
            )
        )
        contents.append(data)
    hashes = a.page_hashes + b.page_hashes
    manifest = msgspec.structs.replace(
        a,
        page_hashes=hashes,
        variants=tuple(variants),
        sides=(),
        expires=_earlier_expiry(a, b),
        labels=_labels_of_both(a, a, b),
    )
    return CodedSegment(manifest, contents[0], tuple(contents[1:]), level_data=tuple(level_data))
