"""KVFetcher (arXiv 2602.09725)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.codec.method import Method
from benchmarks.codec.segments import SegmentMethod
from sgl_kvfetch.quant import Quantiser, make_quantiser


def kvfetcher_methods(bins: Sequence[int]) -> list[Method]:
    """Vector-wise bins, the sliced inter-frame layout, tiles of heads, lossless HEVC (section 3.2), in our own
    segments, whose spans, layouts and codec follow it.

    Assumed, since the paper leaves them open or its code is not public: 256 bins have a scale for each token, layer and
    head, fewer one for each token and layer, as CacheGen has; spans of 1,024 tokens; near-square tiles in pictures of
    240p, not searched for; libx265's fastest preset in place of NVENC, which on such data costs no bits.
    """
    source = "KVFetcher (arXiv 2602.09725, 3.2): vector-wise bins, inter- and intra-frame layout, lossless HEVC"
    return [
        SegmentMethod(f"kvfetcher-{count}", source, "KVFetcher's recipe", _quantiser(count), "hevc") for count in bins
    ]


def _quantiser(bins: int) -> Quantiser:
    return make_quantiser("uint8") if bins == 256 else make_quantiser("cachegen", [bins], [bins])
