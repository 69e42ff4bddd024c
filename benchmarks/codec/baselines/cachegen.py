"""CacheGen (SIGCOMM'24, sections 5.2 and 5.3) as LMCache stores it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.codec.baselines import arithmetic
from benchmarks.codec.baselines.bins import from_bins, lmcache_bins, to_bins
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

# Tokens per stream: LMCache's CACHEGEN_GPU_MAX_TOKENS_PER_CHUNK. The streams of a longer chunk share its tables.
_STREAM_TOKENS = 256


class CacheGen(TensorMethod):
    """Vector-wise bins, then an order-0 arithmetic coder with a table for each layer and channel of a chunk.

    A chunk stores what LMCache's ``CacheGenGPUEncoderOutput`` holds (``storage_backend/serde/cachegen_basics.py`` and
    ``cachegen_encoder.py``): a bitstream for each layer, channel and 256 tokens, with its length as int32; the tables,
    int16 ``(layers, channels, bins + 1)``, where ``bins`` is the maximum over layers; each token and layer's largest
    magnitude in the KV's dtype. Pickle's overhead of some hundred bytes per tensor is not counted. LMCache does not
    have the paper's delta of each token to its group's anchor, and neither does this.

    If the context is shorter than a chunk, the chunk holds the whole context.
    """

    def __init__(self, chunk_tokens: int, bins: int | None) -> None:
        """``bins``: for all layers; if None, LMCache's choice for each layer."""
        rate = "" if bins is None else f"-{bins}"
        which = "LMCache's bins by layer" if bins is None else f"{bins} bins"
        self.name = f"cachegen{rate}/{chunk_tokens}"
        chunks = f"chunks of {chunk_tokens:,} tokens or the whole context if it is shorter"
        self.source = f"CacheGen (SIGCOMM'24, 5.2, 5.3) as in LMCache, {which}, {chunks}"
        self.family = f"CacheGen, chunks of {chunk_tokens:,}"
        self._chunk_tokens = chunk_tokens
        self._bins = bins

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        for chunk in torch.split(values, self._chunk_tokens):
            yield from self._encode_chunk(tensor, chunk)

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        starts = range(0, shape[0], self._chunk_tokens)
        sizes = (min(self._chunk_tokens, shape[0] - start) for start in starts)
        return torch.cat([self._decode_chunk(tensor, parts, (size, *shape[1:])) for size in sizes])

    def _bins_of(self, tensor: TensorName, num_layers: int) -> list[int]:
        return lmcache_bins(tensor, num_layers) if self._bins is None else [self._bins] * num_layers

    def _encode_chunk(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        bins = self._bins_of(tensor, values.shape[1])
        integers, largest = to_bins(values, bins)
        symbols = integers.transpose(1, 2).flatten(0, 1).numpy()  # (layers * channels, tokens)
        tables = arithmetic.cumulative(symbols, max(bins))
        yield to_bytes(largest)
        yield tables.tobytes()
        for start in range(0, symbols.shape[1], _STREAM_TOKENS):
            streams = arithmetic.encode(symbols[:, start : start + _STREAM_TOKENS], tables)
            yield np.array([len(stream) for stream in streams], np.int32).tobytes()
            yield b"".join(streams)

    def _decode_chunk(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        bins = self._bins_of(tensor, num_layers)
        largest = from_bytes(next(parts), KV_DTYPE, (num_layers, num_tokens, 1))
        tables = np.frombuffer(next(parts), np.uint16).reshape(-1, max(bins) + 1)
        pieces = []
        for start in range(0, num_tokens, _STREAM_TOKENS):
            ends = np.frombuffer(next(parts), np.int32).cumsum().tolist()
            data = next(parts)
            streams = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            pieces.append(arithmetic.decode(streams, tables, min(_STREAM_TOKENS, num_tokens - start)))
        symbols = torch.from_numpy(np.concatenate(pieces, axis=1))
        integers = symbols.view(num_layers, num_heads * head_dim, num_tokens).transpose(1, 2)
        return from_bins(integers, largest, bins, shape)
