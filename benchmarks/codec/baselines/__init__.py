"""Other authors' methods, one module each, as close to the source as it allows."""

from __future__ import annotations

from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.fp8 import AsymK16V8, Fp8
from benchmarks.codec.baselines.kivi import Kivi
from benchmarks.codec.baselines.kvfetcher import kvfetcher_methods
from benchmarks.codec.baselines.llm265 import Llm265
from benchmarks.codec.baselines.mean import Mean
from benchmarks.codec.baselines.saw_int4 import SawInt4
from benchmarks.codec.baselines.shadowserve import ShadowServe
from benchmarks.codec.baselines.sink import WithExactSink
from benchmarks.codec.baselines.turboquant import turboquant_methods
from benchmarks.codec.method import Method

UNIFORM_BINS = (32, 16, 8)


def baselines() -> list[Method]:
    """Return all methods except KVTC, which must first be fitted to a model."""
    return [
        *(CacheGen(chunk, bins) for chunk in (256, 2048) for bins in (None, *UNIFORM_BINS)),
        *(WithExactSink(CacheGen(2048, bins)) for bins in UNIFORM_BINS),
        *(ShadowServe(bins) for bins in UNIFORM_BINS),
        *kvfetcher_methods((256, *UNIFORM_BINS)),
        *(WithExactSink(method) for method in kvfetcher_methods((256, 32, 16))),
        *(Llm265(qp) for qp in (8, 14, 20, 26, 32)),
        *(Kivi(bits) for bits in (4, 2)),
        *(SawInt4(rotate_v) for rotate_v in (False, True)),
        *turboquant_methods(),
        Fp8(),
        AsymK16V8(),
        Mean(),
    ]
