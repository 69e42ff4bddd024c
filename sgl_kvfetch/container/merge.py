"""Two neighbouring segments into one of twice the length, without touching a value."""

from __future__ import annotations

from concurrent.futures import Executor

import msgspec
import torch

from sgl_kvfetch.container.manifest import Cell, Manifest
from sgl_kvfetch.container.segment import CodedSegment, SegmentReader, SegmentSpec, assemble, encode_cells
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.quant import Quantised


def merge_segments(
    spec: SegmentSpec, left: CodedSegment, right: CodedSegment, executor: Executor | None = None
) -> CodedSegment:
    """The segment that covers both. ``left`` and ``right`` are buddies: equally long, neighbours, and the pair aligned.

    Where their spans are already as long as the writer's, chunks are copied as they are; otherwise they are decoded,
    joined and coded again, integers and scales unchanged. Checksums of what is decoded are verified. Raises FormatError
    and CorruptError.
    """
    a, b = left.manifest, right.manifest
    follows = b.first_page == a.first_page + a.num_pages and b.previous_hash == a.page_hashes[-1]
    if a.namespace != b.namespace or a.num_pages != b.num_pages or not follows:
        raise FormatError(f"segments {a.key.stem} and {b.key.stem} are not neighbours of one length")
    if a.first_page % (2 * a.num_pages):
        raise FormatError(f"segments at page {a.first_page} of {a.num_pages} pages are not buddies")
    if _spans_fit(spec, a, b):
        merged = msgspec.structs.replace(a, page_hashes=a.page_hashes + b.page_hashes)
        variant = a.variants[0]
        chunks = variant.chunks + b.variants[0].chunks
        return assemble(merged, variant.k_layout, variant.v_layout, chunks, left.data + right.data)

    halves = [(SegmentReader(s.manifest, spec.quantiser), s.data) for s in (left, right)]

    def joined(manifest: Manifest, cell: Cell) -> Quantised:
        """A merged span holds a whole number of the halves' spans, from its own first page on."""
        first_page, end_page = manifest.span_range(cell.span)
        pieces = []
        for half, (reader, data) in enumerate(halves):
            for span in range(reader.manifest.num_spans):
                first, end = (page + half * a.num_pages for page in reader.manifest.span_range(span))
                if first_page < end and first < end_page:
                    if first < first_page or end > end_page:
                        raise FormatError(f"spans of {reader.manifest.key.stem} do not divide the merged ones")
                    part = Cell(span, cell.layer_group, cell.tensor)
                    pieces.append(reader.decode_cell(part, data[slice(*reader.cell_range(part))]))
        scales = [piece.scales for piece in pieces if piece.scales is not None]
        return Quantised(torch.cat([piece.integers for piece in pieces], dim=1), torch.cat(scales) if scales else None)

    return encode_cells(spec, a.first_page, a.previous_hash, a.page_hashes + b.page_hashes, joined, executor)


def _spans_fit(spec: SegmentSpec, a: Manifest, b: Manifest) -> bool:
    """Whether the halves' chunks can stand in the merged segment as they are."""
    x, y = a.variants[0], b.variants[0]
    return (
        a.span_pages == b.span_pages == spec.span_pages
        and a.num_pages % a.span_pages == 0
        and (x.k_layout, x.v_layout) == (y.k_layout, y.v_layout)
    )
