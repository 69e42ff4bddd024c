"""KVTC (arXiv 2511.01815)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.codec.baselines.affine import META_DTYPE
from benchmarks.codec.baselines.kvtc.calibration import SINK_TOKENS, Fit, TensorFit, flatten_k, unflatten_k
from benchmarks.codec.baselines.kvtc.groups import code_bytes, dequantise, pack_codes, quantise, unpack_codes
from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes
from sgl_kvfetch.types import TENSORS

RATIOS = (2, 3, 4, 6, 8, 16, 32, 64)  # from 8 on, the paper's
RECENT_TOKENS = 128
_LEVEL = 6


class Kvtc(Method):
    """Principal components of each token's values, over all layers and heads at once. Groups of neighbouring components
    get 0, 2, 4 or 8 bits per coefficient; DEFLATE follows. K, with its rotation removed, and V are coded separately.

    Set ``fit``, which ``calibrate`` returns, before you encode anything. A model has one ``fit``; like our profile, its
    bytes are not counted.

    The paper has no public code, and this follows summaries of its text. A ratio is 16 bits divided by a value's bits
    before DEFLATE, the same for K and V. There are at most 10,000 components, of centred values (section 3.1, B.14). A
    group has 1, 16, 64, 256 or 1,024 coefficients in int2, int4 or FP8, and a scale and a shift of 16 bits each, which
    the budget counts. Dynamic programming finds the groups with the least squared error on calibration data (3.2,
    B.17). The first 4 tokens and the last 128 stay exact (section 5). The paper calibrates on at least 160,000 tokens
    of web text and reasoning; this calibrates on the text that it is given.

    The paper's ratios leave out the exact tokens. Here they are counted: with a context of 1,024 tokens, the last 128
    alone take 2 bits per value. Hence there are also rows without recent exact tokens, as in the paper's B.7.

    Where the summaries are silent, we assume:

    * Scale and shift are float16, and each token has its own. Integers divide the range from the group's smallest to
      its largest value. FP8 is E4M3, centred between the two and scaled to them.
    * The errors of groups are measured on 256 tokens, evenly spread over those of the calibration.
    * The basis is in float32. It comes from an exact eigendecomposition, or from a randomised SVD, as in the paper, if
      both the number of tokens and the values per token exceed 8,192.
    * Exact tokens are in the KV's dtype, K with its rotary embedding.
    * zlib at level 6 replaces nvCOMP. K and V have two streams each: the codes, coefficient by coefficient with all its
      tokens; and the scales and shifts, all low bytes first. No other order that we tried takes fewer bytes.
    """

    def __init__(self, ratio: int, recent_tokens: int = RECENT_TOKENS) -> None:
        """``ratio``: 16 bits divided by the bits of a coded value before DEFLATE. ``recent_tokens``: how many of the
        last tokens are kept exact; 128 in the paper."""
        self.name = f"kvtc-{ratio}x"
        self.family = "KVTC"
        if recent_tokens != RECENT_TOKENS:
            self.name += f"/recent-{recent_tokens}"
            self.family += f", {recent_tokens} recent tokens exact"
        exact = f"the first {SINK_TOKENS} and last {recent_tokens} tokens exact"
        self.source = f"KVTC (arXiv 2511.01815), 1/{ratio} before DEFLATE, {exact}; the basis is not counted"
        self.ratio = ratio
        self.fit: Fit | None = None
        self._recent_tokens = recent_tokens

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        assert self.fit is not None, self.name
        coded = self._coded(len(k))
        parts = [to_bytes(exact) for x in (k, v) for exact in (x[: coded.start], x[coded.stop :])]
        if coded.start < coded.stop:
            parts += self._encode_vectors(
                flatten_k(k[coded].float(), coded.start, self.fit.rope), self.fit.tensors["k"]
            )
            parts += self._encode_vectors(v[coded].float().flatten(1), self.fit.tensors["v"])
        return parts

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.fit is not None, self.name
        coded = self._coded(shape.num_tokens)
        left = iter(parts)
        k, v = (torch.empty(shape.of_tensor(tensor), dtype=KV_DTYPE) for tensor in TENSORS)
        for values in (k, v):
            for exact in (values[: coded.start], values[coded.stop :]):
                if data := next(left):
                    exact[:] = from_bytes(data, KV_DTYPE, exact.shape)
        if coded.start < coded.stop:
            num_tokens = coded.stop - coded.start
            k_vectors, v_vectors = (self._decode_vectors(left, num_tokens, self.fit.tensors[t]) for t in TENSORS)
            k[coded] = unflatten_k(k_vectors, k[coded].shape, coded.start, self.fit.rope).to(KV_DTYPE)
            v[coded] = v_vectors.view(v[coded].shape).to(KV_DTYPE)
        return k, v

    def _coded(self, num_tokens: int) -> slice:
        """Return the tokens that are not kept exact."""
        first = min(SINK_TOKENS, num_tokens)
        return slice(first, max(first, num_tokens - self._recent_tokens))

    def _encode_vectors(self, vectors: torch.Tensor, fit: TensorFit) -> Iterator[bytes]:
        """Encode ``vectors``, float32 ``(tokens, layers * heads * dim)``."""
        groups = fit.groups[self.ratio]
        coefficients = fit.components.coefficients(vectors, groups[-1].end if groups else 0)
        coded = [quantise(coefficients[:, group.first : group.end], group.kind) for group in groups]
        codes = b"".join(pack_codes(codes, group.kind) for group, (codes, _) in zip(groups, coded, strict=True))
        metas = b"".join(to_bytes(meta) for _, meta in coded)
        yield zlib.compress(codes, _LEVEL)
        yield zlib.compress(np.frombuffer(metas, np.uint8).reshape(-1, 2).T.tobytes(), _LEVEL)

    def _decode_vectors(self, parts: Iterator[bytes], num_tokens: int, fit: TensorFit) -> torch.Tensor:
        groups = fit.groups[self.ratio]
        codes = zlib.decompress(next(parts))
        metas = np.frombuffer(zlib.decompress(next(parts)), np.uint8).reshape(2, -1).T.tobytes()
        coefficients = torch.zeros(num_tokens, groups[-1].end if groups else 0)
        offset = 0
        for meta, group in zip(from_bytes(metas, META_DTYPE, (len(groups), num_tokens, 2)), groups, strict=True):
            size = code_bytes(num_tokens, group.size, group.kind)
            levels = unpack_codes(codes[offset : offset + size], num_tokens, group.size, group.kind)
            coefficients[:, group.first : group.end] = dequantise(levels, meta, group.kind)
            offset += size
        return fit.components.restore(coefficients)


def kvtc_methods() -> list[Kvtc]:
    """Return all ratios, each with the paper's 128 recent exact tokens and with none. The caller sets their ``fit``."""
    return [Kvtc(ratio, recent_tokens) for recent_tokens in (RECENT_TOKENS, 0) for ratio in RATIOS]
