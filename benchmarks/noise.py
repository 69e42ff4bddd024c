"""Makes real segments of noise, for benchmarks of stores: many bytes, quickly, that no codec makes fewer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.heads import make_heads
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

_EXACT = make_quantiser("exact")
_GEOMETRY = KVGeometry(num_layers=2, num_heads=2, k_head_dim=64, v_head_dim=64, page_size=64, dtype="bfloat16")
NOISE_HEADS = make_heads(_GEOMETRY, _EXACT)
PAGE_BYTES = _GEOMETRY.page_bytes  # 64 KiB


def noise_values(num_pages: int, seed: int) -> dict[TensorName, torch.Tensor]:
    """Return K and V of random bits, ``(tokens, layers, heads, dim)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_pages * _GEOMETRY.page_size, _GEOMETRY.num_layers, _GEOMETRY.num_heads, _GEOMETRY.k_head_dim
    bits = [torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16) for _ in TENSORS]
    return {tensor: each.view(torch.bfloat16) for tensor, each in zip(TENSORS, bits, strict=True)}


def noise_segment(
    values: dict[TensorName, torch.Tensor],
    page_hashes: Sequence[bytes],
    *,
    first_page: int = 0,
    previous_hash: bytes | None = None,
    span_pages: int = 16,
) -> CodedSegment:
    """Return a segment of these pages. Its data take about ``PAGE_BYTES`` a page."""
    spec = SegmentSpec(NOISE_HEADS, _EXACT, "zstd", "240p", span_pages)
    return encode_segment(spec, values, first_page, previous_hash, page_hashes)
