"""Join short segments that cover a span into one, without changing a value."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import pairwise

import msgspec

from sgl_kvfetch.codec.container.manifest import Cell
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, EncodedSegment, SegmentSpec, encode_cells
from sgl_kvfetch.codec.container.sides import join_sides
from sgl_kvfetch.codec.quant.base import Quantised, join_parts
from sgl_kvfetch.errors import FormatError


def join_segments(
    spec: SegmentSpec, pieces: Sequence[CodedSegment], executor: Executor | None = None
) -> EncodedSegment:
    """Return the segment of one span that ``pieces`` cover, each of them as ``spec``'s writer encoded it.

    Their cells are decoded, joined and encoded again: integers and bytes stay the same. Side pages are copied. The
    whole expires when the first of its pieces does. Raises FormatError and CorruptError.
    """
    first, *_ = manifests = [each.manifest for each in pieces]
    hashes = tuple(page_hash for each in manifests for page_hash in each.page_hashes)
    manifest = spec.manifest(first.first_page, first.previous_hash, hashes)
    follow = all(
        (b.first_page, b.previous_hash) == (a.first_page + a.num_pages, a.page_hashes[-1])
        for a, b in pairwise(manifests)
    )
    is_span = manifest.num_spans == 1 and len(hashes) == spec.span_pages and first.first_page % len(hashes) == 0
    if not follow or not is_span:
        places = ", ".join(f"{each.num_pages} pages at {each.first_page}" for each in manifests)
        raise FormatError(f"expected segments that make up one span of {spec.span_pages} pages, found {places}")
    readers = [SegmentReader(each, spec.quantiser) for each in manifests]
    parts = spec.quantiser.parts(manifest.geometry.torch_dtype)

    def joined(cell: Cell) -> Quantised:
        return join_parts(
            parts,
            [
                reader.decode_cell(part, reader.chunks_in(part, [each.data, *each.level_data]))
                for reader, each in zip(readers, pieces, strict=True)
                for part in (cell._replace(span=span) for span in range(reader.manifest.num_spans))
            ],
        )

    expires = min((each.expires for each in manifests if each.expires is not None), default=None)
    whole = encode_cells(spec, msgspec.structs.replace(manifest, expires=expires), joined, executor)
    side = join_sides(
        (each.manifest.first_page - first.first_page, zip(each.manifest.sides, each.side_data, strict=True))
        for each in pieces
    )
    return whole if side is None else whole.with_side(*side)
