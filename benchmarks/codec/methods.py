"""Lists all methods, and selects them by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.fp8 import Fp8
from benchmarks.codec.baselines.kivi import Kivi
from benchmarks.codec.baselines.turboquant import turboquant_methods
from benchmarks.codec.method import Method
from benchmarks.codec.ours import our_methods
from benchmarks.codec.segments import SegmentMethod
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError

_BINS = (32, 16, 8)


def all_methods(profile: Profile | None) -> list[Method]:
    """Return all methods. ``klt`` needs a profile."""
    others = (*map(CacheGen, _BINS), *_kvfetcher(), Kivi(4), Kivi(2), *turboquant_methods(), Fp8())
    methods = [*our_methods(profile), *others]
    assert len({method.name for method in methods}) == len(methods)
    return methods


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


def _kvfetcher() -> Iterator[Method]:
    """Yield KVFetcher's recipe (arXiv 2602.09725, 3.2) in our segments: vector-wise bins, sliced inter-frame layout,
    tiles, lossless HEVC.

    The paper leaves some points open, and its code is not public. We assume: with 256 bins a scale for each token,
    layer and head, with fewer bins one for each token and layer, as in CacheGen; spans of 1,024 tokens; near-square
    tiles in 240p pictures, without a search; libx265's fastest preset instead of NVENC, which costs no bits here.
    """
    yield SegmentMethod("kvfetcher-256", "KVFetcher's recipe", make_quantiser("uint8"), "hevc")
    for bins in _BINS:
        yield SegmentMethod(
            f"kvfetcher-{bins}", "KVFetcher's recipe", make_quantiser("cachegen", [bins], [bins]), "hevc"
        )
