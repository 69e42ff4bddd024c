"""Ways to store a KV cache, each at one rate: ours, by quantiser and codec, and CacheGen's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import torch

from benchmarks.heads import make_heads
from harness.small_segments import page_hashes
from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellValues, Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.symmetric import centre_of
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.plane.store import MAX_SEGMENT_TOKENS, RESOLUTION
from sgl_kvfetch.protocol.quantiser import SPAN_TOKENS
from sgl_kvfetch.types import KVGeometry, dtype_name

KV_DTYPE = torch.bfloat16
PAGE_TOKENS = 64
TARGET_KLS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_LEVELS = 3
_BINS = (32, 16, 8)


class Coded(NamedTuple):
    """``k``, ``v``: the restored values, bfloat16 ``(tokens, layers, heads, dim)``. ``num_bytes``: all that is
    stored."""

    k: torch.Tensor
    v: torch.Tensor
    num_bytes: int

    @property
    def bits_per_value(self) -> float:
        return self.num_bytes * 8 / (self.k.numel() + self.v.numel())


class Method(ABC):
    """One way to store a KV cache, with a unique ``name``."""

    name: str

    @abstractmethod
    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        """Encode and decode a sequence from its start. ``k``, ``v``: bfloat16 ``(tokens, layers, heads, dim)``, K with
        its rotary embedding. Raises UnsupportedError for a shape that the method cannot encode."""


class SegmentMethod(Method):
    """Stores segments, spans and pictures as servers write them by default."""

    def __init__(
        self, name: str, quantiser: Quantiser, codec: str, *, num_levels: int = 1, kept_levels: int = 1
    ) -> None:
        """``num_levels``: of coefficients, of which the first ``kept_levels`` are stored."""
        self.name = name
        self._quantiser, self._codec = quantiser, codec
        self._num_levels, self._kept_levels = num_levels, kept_levels

    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        restored, num_bytes = CellValues(torch.empty_like(k), torch.empty_like(v)), 0
        for manifest, data in self.encode(k, v):
            self._decode(manifest, data, restored)
            num_bytes += len(manifest) + len(data)
        return Coded(*restored, num_bytes)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[bytes, bytes]]:
        """Yield the manifest of each segment, and its data objects, joined."""
        num_tokens, num_layers, num_heads, k_dim = k.shape
        if num_tokens % PAGE_TOKENS:
            raise UnsupportedError(f"{self.name}: {num_tokens} tokens; expected a multiple of {PAGE_TOKENS}")
        geometry = KVGeometry(num_layers, num_heads, k_dim, v.shape[3], PAGE_TOKENS, dtype_name(k.dtype))
        heads, resolution = make_heads(geometry, self._quantiser), resolution_for(self._codec, RESOLUTION)
        span_pages, hashes = SPAN_TOKENS // PAGE_TOKENS, page_hashes(num_tokens // PAGE_TOKENS)
        spec = SegmentSpec(heads, self._quantiser, self._codec, resolution, span_pages, num_levels=self._num_levels)
        for first, count in buddy_split(0, len(hashes), MAX_SEGMENT_TOKENS // PAGE_TOKENS):
            tokens = slice(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)
            previous, pages = hashes[first - 1] if first else None, hashes[first : first + count]
            segment = encode_segment(spec, {"k": k[tokens], "v": v[tokens]}, first, previous, pages)
            kept, (variant,) = self._kept_levels - 1, segment.manifest.variants
            manifest = msgspec.structs.replace(segment.manifest, variants=(variant.with_levels(kept),))
            yield manifest.encode(), b"".join((segment.data, *segment.level_data[:kept]))

    def _decode(self, coded_manifest: bytes, data: bytes, whole: CellValues) -> None:
        manifest = decode_manifest(coded_manifest)
        reader = SegmentReader(manifest, self._quantiser, num_levels=self._kept_levels)
        ends = accumulate((each.size_bytes for each in manifest.data), initial=0)
        objects = [memoryview(data)[start:end] for start, end in pairwise(ends)]
        for cell in manifest.cells():
            values = reader.dequantise_cell(cell, reader.decode_cell(cell, reader.chunks_in(cell, objects)))
            pages = manifest.span_range(cell.span)
            tokens = slice(*((manifest.first_page + page) * PAGE_TOKENS for page in pages))
            there = whole.tokens(tokens).cell(
                manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
            )
            for into, part in zip(there, values, strict=True):
                into.copy_(part)


class CacheGen(Method):
    """CacheGen (SIGCOMM'24, sections 5.2 and 5.3) as LMCache stores it: bins by vector (``torch_quant_vectorized``),
    then an order-0 arithmetic coder with a table for each layer and channel of a chunk.

    A chunk stores what LMCache's ``CacheGenGPUEncoderOutput`` holds (``storage_backend/serde/cachegen_basics.py`` and
    ``cachegen_encoder.py``): a bitstream for each layer, channel and 256 tokens, with its length as int32; the tables,
    int16 ``(layers, channels, bins + 1)``; each token and layer's largest magnitude in the KV's dtype. The coder is
    lossless, so bitstreams are not made: each counts as the bits of its symbols by these tables, one that ends it, and
    whole bytes. Pickle's overhead is not counted. LMCache does not have the paper's delta of each token to its group's
    anchor, and neither does this. Unlike in LMCache, a vector of zeros is restored to zeros, not NaN.
    """

    _CHUNK_TOKENS = 2048  # or the whole context, if that is shorter
    _STREAM_TOKENS = 256  # LMCache's CACHEGEN_GPU_MAX_TOKENS_PER_CHUNK

    def __init__(self, bins: int) -> None:
        """``bins``: of all layers."""
        self.name = f"cachegen-{bins}/{self._CHUNK_TOKENS}"
        self._bins, self._centre = bins, float(centre_of(bins))

    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        sides = [[self._code_chunk(chunk) for chunk in torch.split(x, self._CHUNK_TOKENS)] for x in (k, v)]
        restored_k, restored_v = (torch.cat([values for values, _ in side]) for side in sides)
        return Coded(restored_k, restored_v, sum(size for side in sides for _, size in side))

    def _code_chunk(self, values: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = values.flatten(2).transpose(0, 1)  # (layers, tokens, channels)
        largest = x.abs().amax(-1, keepdim=True)
        factor = torch.where(largest > 0, torch.tensor(self._centre) / largest.float(), 0.0)
        integers = torch.round(x * factor + self._centre).to(torch.uint8)
        restored = (integers - self._centre) / self._centre * largest
        symbols = integers.transpose(1, 2).flatten(0, 1).long()  # (layers * channels, tokens)
        size = largest.numel() * KV_DTYPE.itemsize + self._coded_bytes(symbols)
        return restored.transpose(0, 1).reshape(values.shape).to(KV_DTYPE), size

    def _coded_bytes(self, symbols: torch.Tensor) -> int:
        """Return the bytes of the tables, whose frequencies are LMCache's ``calculate_cdf``, and of the bitstreams."""
        num_rows, num_tokens = symbols.shape
        at = symbols + torch.arange(num_rows)[:, None] * self._bins
        counts = torch.bincount(at.flatten(), minlength=num_rows * self._bins).view(num_rows, self._bins)
        ends = (0xFFFF - self._bins) * counts.cumsum(1) // num_tokens + torch.arange(1, self._bins + 1)
        ends[:, -1] = 1 << 16
        frequencies = torch.diff(ends, dim=1, prepend=torch.zeros(num_rows, 1, dtype=ends.dtype))
        bits = (16 - frequencies.double().log2()).gather(1, symbols)
        streams = [(part.sum(1) + 1).div(8).ceil() for part in torch.split(bits, self._STREAM_TOKENS, dim=1)]
        tables = num_rows * (self._bins + 1) * 2
        return tables + sum(4 * num_rows + int(stream.sum()) for stream in streams)


def all_methods(profile: Profile | None) -> list[Method]:
    """Return all methods. ``klt`` needs a profile, which is not counted: one file a model. It uses its default target,
    and the ``TARGET_KLS`` that the profile reaches."""
    plain = [("exact", "ans"), ("exact", "zstd"), ("uint8", "zstd")]
    methods: list[Method] = [SegmentMethod(f"{name}/{codec}", make_quantiser(name), codec) for name, codec in plain]  # type: ignore[arg-type]
    if profile is not None:
        for codec in ("ans", "hevc", "zstd"):
            for kl in in_range(profile, (None, *TARGET_KLS)):
                name = "klt" if kl is None else f"klt-{kl:g}"
                methods.append(SegmentMethod(f"{name}/{codec}", KltQuantiser(profile, kl), codec))
        methods += _in_levels(profile)
    return [*methods, *map(CacheGen, _BINS)]


def _in_levels(profile: Profile) -> Iterator[Method]:
    """Yield ``klt`` at its default step in levels, with only the first ones stored. For comparison, yield ``klt`` that
    is quantised at the larger steps of these levels."""
    step = profile.step_for(None)
    for kept in range(1, _LEVELS + 1):
        klt = KltQuantiser(profile, step=step)
        yield SegmentMethod(f"klt/levels-{kept}", klt, "ans", num_levels=_LEVELS, kept_levels=kept)
        if kept < _LEVELS:
            unit = 3 ** (_LEVELS - kept)
            yield SegmentMethod(f"klt-step-{unit}/ans", KltQuantiser(profile, step=step * unit), "ans")


def in_range(profile: Profile, target_kls: Iterable[float | None]) -> list[float | None]:
    """Return the targets that the profile reaches; None is its default."""
    lowest, highest = profile.curve[0].kl, profile.curve[-1].kl
    return [kl for kl in target_kls if kl is None or lowest <= kl <= highest]


def select(methods: Sequence[Method], patterns: Sequence[str]) -> list[Method]:
    """Return the methods with names that match a shell-style pattern; all if there are no patterns.

    Raises ConfigError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(method.name, pattern) for method in methods):
            names = ", ".join(method.name for method in methods)
            hint = "; klt needs --profile" if pattern.startswith("klt") else ""
            raise ConfigError(f"no method matches {pattern!r}; known are {names}{hint}")
    return [m for m in methods if not patterns or any(fnmatchcase(m.name, pattern) for pattern in patterns)]
