"""Methods that combine one of our quantisers and codecs, and store segments as a writer does, with manifests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec
import torch

from benchmarks.codec.method import KV_DTYPE, KVShape, Method
from benchmarks.heads import make_heads
from harness.small_segments import page_hashes
from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellValues, Quantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.plane.store import MAX_SEGMENT_TOKENS, RESOLUTION
from sgl_kvfetch.protocol.quantiser import SPAN_TOKENS
from sgl_kvfetch.types import KVGeometry, dtype_name

PAGE_TOKENS = 64


class SegmentMethod(Method):
    """Stores segments, spans and pictures as servers write them by default."""

    def __init__(
        self,
        name: str,
        family: str,
        quantiser: Quantiser,
        codec: str,
        *,
        num_levels: int = 1,
        kept_levels: int = 1,
    ) -> None:
        """``num_levels``: of coefficients, of which the first ``kept_levels`` are stored."""
        self.name, self.family = name, family
        self.quantiser = quantiser
        self.codec = codec
        self.num_levels, self.kept_levels = num_levels, kept_levels

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        shape = KVShape.of(k, v)
        if shape.num_tokens % PAGE_TOKENS:
            raise UnsupportedError(f"{self.name}: {shape.num_tokens} tokens; expected a multiple of {PAGE_TOKENS}")
        hashes = page_hashes(shape.num_tokens // PAGE_TOKENS)
        geometry = KVGeometry(
            shape.num_layers, shape.num_heads, shape.k_head_dim, shape.v_head_dim, PAGE_TOKENS, dtype_name(KV_DTYPE)
        )
        heads = make_heads(geometry, self.quantiser)
        resolution = resolution_for(self.codec, RESOLUTION)
        spec = SegmentSpec(
            heads,
            self.quantiser,
            self.codec,
            resolution,
            SPAN_TOKENS // PAGE_TOKENS,
            num_levels=self.num_levels,
        )
        parts = []
        for first, count in buddy_split(0, len(hashes), MAX_SEGMENT_TOKENS // PAGE_TOKENS):
            tokens = slice(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)
            previous = hashes[first - 1] if first else None
            segment = encode_segment(
                spec, {"k": k[tokens], "v": v[tokens]}, first, previous, hashes[first : first + count]
            )
            (variant,) = segment.manifest.variants
            kept = self.kept_levels - 1
            variant = variant.with_levels(kept)
            manifest = msgspec.structs.replace(segment.manifest, variants=(variant,))
            parts += [manifest.encode(), b"".join((segment.data, *segment.level_data[:kept]))]
        return parts

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.empty(shape.of_tensor(tensor), dtype=KV_DTYPE) for tensor in ("k", "v"))
        for manifest, data in segments_of(parts):
            tokens = slice(manifest.first_page * PAGE_TOKENS, (manifest.first_page + manifest.num_pages) * PAGE_TOKENS)
            self._decode_segment(manifest, data, CellValues(k[tokens], v[tokens]))
        return k, v

    def _decode_segment(self, manifest: Manifest, data: bytes, into: CellValues) -> None:
        reader = SegmentReader(manifest, self.quantiser, num_levels=self.kept_levels)
        ends = accumulate((each.size_bytes for each in manifest.data), initial=0)
        objects = [memoryview(data)[start:end] for start, end in pairwise(ends)]
        for cell in manifest.cells():
            values = reader.dequantise_cell(cell, reader.decode_cell(cell, reader.chunks_in(cell, objects)))
            tokens = slice(*(page * PAGE_TOKENS for page in manifest.span_range(cell.span)))
            layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
            for whole, part in zip(into.tokens(tokens).cell(layers, heads), values, strict=True):
                whole.copy_(part)


def segments_of(parts: Sequence[bytes]) -> Iterator[tuple[Manifest, bytes]]:
    """Yield each segment's manifest from the result of ``SegmentMethod.encode``, and its data objects, joined."""
    for manifest, data in zip(parts[::2], parts[1::2], strict=True):
        yield decode_manifest(manifest), data
