"""KVFetcher (arXiv 2602.09725)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.codec.method import Method
from benchmarks.codec.segments import SegmentMethod
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser


def kvfetcher_methods(bins: Sequence[int]) -> list[Method]:
    """Return the recipe in our segments: vector-wise bins, sliced inter-frame layout, tiles, lossless HEVC (3.2).

    The paper leaves some points open, and its code is not public. We assume: with 256 bins a scale for each token,
    layer and head, with fewer bins one for each token and layer, as in CacheGen; spans of 1,024 tokens; near-square
    tiles in 240p pictures, without a search; libx265's fastest preset instead of NVENC, which costs no bits here.
    """
    source = "KVFetcher (arXiv 2602.09725, 3.2): vector-wise bins, inter- and intra-frame layout, lossless HEVC"
    return [
        SegmentMethod(f"kvfetcher-{count}", source, "KVFetcher's recipe", _quantiser(count), "hevc") for count in bins
    ]


def _quantiser(bins: int) -> Quantiser:
    return make_quantiser("uint8") if bins == 256 else make_quantiser("cachegen", [bins], [bins])
