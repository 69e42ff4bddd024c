"""Long prefixes of equal spans, of which only one is encoded, and the memory of a load."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import msgspec
import torch

from benchmarks.gpu_check.quantise import make_profile
from benchmarks.heads import make_heads
from harness.small_segments import page_hashes
from sgl_kvfetch.codec.container.reader import CodedChunk
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_cells, encode_segment, make_variant
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.quant.base import ExactQuantiser, Quantised, Quantiser
from sgl_kvfetch.codec.quant.klt import UNIT, ZERO, KltQuantiser
from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

PAGE_TOKENS = 64
SPAN_TOKENS = 1024
_MAX_SEGMENT_TOKENS = 8192
_SAMPLE_S = 0.001


class Sampler:
    """Reads several numbers of bytes every millisecond. ``peaks`` holds each one's largest growth since the start."""

    def __init__(self, read: Callable[[], Sequence[int]]) -> None:
        self._read = read
        self._base = read()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peaks = [0] * len(self._base)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            grown = (now - base for now, base in zip(self._read(), self._base, strict=True))
            self.peaks = list(map(max, self.peaks, grown))


@dataclass(frozen=True)
class Model:
    """Like Llama-3.1-8B, for `exact`, or for `klt` with a transform that changes nothing."""

    layers: int
    dim: int = 128
    coding: str = "klt"

    def make_quantiser(self) -> Quantiser:
        return ExactQuantiser() if self.coding == "exact" else self._klt()

    def _klt(self) -> KltQuantiser:
        return KltQuantiser(make_profile(self.dim, self.layers), step=1.0)

    def geometry(self) -> KVGeometry:
        """Return the profile's heads and first layers, rounded up to whole cells."""
        profile = self._klt().profile
        whole = -(-self.layers // profile.grid.cell_layers) * profile.grid.cell_layers
        layers, heads = min(whole, profile.grid.num_layers), profile.grid.num_heads
        return KVGeometry(layers, heads, profile.k_head_dim, profile.v_head_dim, PAGE_TOKENS, "bfloat16")


def repeated_segments(model: Model, num_tokens: int) -> list[CodedSegment]:
    """Return a prefix of equal spans, of random coefficients, or of values whose channels differ in scale."""
    quantiser, codec = model.make_quantiser(), "ans"
    span_pages = SPAN_TOKENS // PAGE_TOKENS
    hashes = page_hashes(num_tokens // PAGE_TOKENS)
    spec = SegmentSpec(make_heads(model.geometry(), quantiser), quantiser, codec, FLAT, span_pages)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        if model.coding == "exact":
            span = encode_segment(spec, _values(model.geometry()), 0, None, hashes[:span_pages], threads)
        else:
            manifest = spec.manifest(0, None, hashes[:span_pages])
            counts = dict(zip(manifest.span_cells(0), manifest.coefficients, strict=True))
            span = encode_cells(spec, manifest, lambda cell: _random(counts[cell], SPAN_TOKENS), threads).joined()
    (variant,) = span.manifest.variants
    coded, start = [], 0
    for chunk in variant.chunks:
        coded.append(CodedChunk(chunk, span.data[start : start + chunk.size_bytes]))
        start += chunk.size_bytes
    segments = []
    for first, count in buddy_split(0, len(hashes), _MAX_SEGMENT_TOKENS // PAGE_TOKENS):
        repeated, data = make_variant(coded * (count // span_pages), variant.layouts, codec, FLAT)
        manifest = spec.manifest(first, hashes[first - 1] if first else None, hashes[first : first + count])
        segments.append(CodedSegment(msgspec.structs.replace(manifest, variants=(repeated,)), data))
    return segments


def _values(geometry: KVGeometry) -> dict[TensorName, torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(0), (SPAN_TOKENS, geometry.num_layers, geometry.num_heads)
    found: dict[TensorName, torch.Tensor] = {}
    for tensor in TENSORS:
        x = torch.randn((*shape, geometry.head_dim(tensor)), generator=generator)
        found[tensor] = (x * torch.logspace(-2, 1, x.shape[-1])).to(geometry.torch_dtype)
    return found


def _random(count: int, num_tokens: int) -> Quantised:
    """Return the parts of a cell without exact tokens, with about three bits per coefficient."""
    steps = 2 * torch.randn((count, num_tokens), generator=torch.Generator().manual_seed(count))
    integers = (ZERO + steps.round()).to(torch.uint8)
    exponents = torch.full((num_tokens,), UNIT, dtype=torch.uint8)
    return exponents, torch.empty(0, dtype=torch.uint8), integers
