"""CacheGen (SIGCOMM'24, sections 5.2 and 5.3) as LMCache stores it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.codec.baselines import arithmetic
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.codec.quant.symmetric import centre_of
from sgl_kvfetch.types import TensorName

_CHUNK_TOKENS = 2048
# Tokens per stream: LMCache's CACHEGEN_GPU_MAX_TOKENS_PER_CHUNK. The streams of a longer chunk share its tables.
_STREAM_TOKENS = 256


class CacheGen(TensorMethod):
    """Vector-wise bins (LMCache's ``torch_quant_vectorized``), then an order-0 arithmetic coder with a table for each
    layer and channel of a chunk.

    A chunk stores what LMCache's ``CacheGenGPUEncoderOutput`` holds (``storage_backend/serde/cachegen_basics.py`` and
    ``cachegen_encoder.py``): a bitstream for each layer, channel and 256 tokens, with its length as int32; the tables,
    int16 ``(layers, channels, bins + 1)``; each token and layer's largest magnitude in the KV's dtype. Pickle's
    overhead of some hundred bytes per tensor is not counted. LMCache does not have the paper's delta of each token to
    its group's anchor, and neither does this. Unlike in LMCache, a vector of zeros is restored to zeros, not NaN.

    If the context is shorter than a chunk, the chunk holds the whole context.
    """

    family = f"CacheGen, chunks of {_CHUNK_TOKENS:,}"

    def __init__(self, bins: int) -> None:
        """``bins``: of all layers."""
        self.name = f"cachegen-{bins}/{_CHUNK_TOKENS}"
        self._bins, self._centre = bins, float(centre_of(bins))

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        for chunk in torch.split(values, _CHUNK_TOKENS):
            yield from self._encode_chunk(chunk)

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        starts = range(0, shape[0], _CHUNK_TOKENS)
        sizes = (min(_CHUNK_TOKENS, shape[0] - start) for start in starts)
        return torch.cat([self._decode_chunk(parts, (size, *shape[1:])) for size in sizes])

    def _encode_chunk(self, values: torch.Tensor) -> Iterator[bytes]:
        x = values.flatten(2).transpose(0, 1)  # (layers, tokens, channels)
        largest = x.abs().amax(-1, keepdim=True)
        factor = torch.where(largest > 0, torch.tensor(self._centre) / largest.float(), 0.0)
        integers = torch.round(x * factor + self._centre).to(torch.uint8)
        symbols = integers.transpose(1, 2).flatten(0, 1).numpy()  # (layers * channels, tokens)
        tables = arithmetic.cumulative(symbols, self._bins)
        yield to_bytes(largest)
        yield tables.tobytes()
        for start in range(0, symbols.shape[1], _STREAM_TOKENS):
            streams = arithmetic.encode(symbols[:, start : start + _STREAM_TOKENS], tables)
            yield np.array([len(stream) for stream in streams], np.int32).tobytes()
            yield b"".join(streams)

    def _decode_chunk(self, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        largest = from_bytes(next(parts), KV_DTYPE, (num_layers, num_tokens, 1))
        tables = np.frombuffer(next(parts), np.uint16).reshape(-1, self._bins + 1)
        pieces = []
        for start in range(0, num_tokens, _STREAM_TOKENS):
            ends = np.frombuffer(next(parts), np.int32).cumsum().tolist()
            data = next(parts)
            streams = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            pieces.append(arithmetic.decode(streams, tables, min(_STREAM_TOKENS, num_tokens - start)))
        symbols = torch.from_numpy(np.concatenate(pieces, axis=1))
        integers = symbols.view(num_layers, num_heads * head_dim, num_tokens).transpose(1, 2)
        x = (integers - self._centre) / self._centre * largest
        return x.transpose(0, 1).reshape(*shape).to(KV_DTYPE)
