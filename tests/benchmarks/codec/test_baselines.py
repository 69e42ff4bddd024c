from __future__ import annotations

import pytest
import torch

from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.turboquant import Coder, TurboQuant
from benchmarks.codec.method import KVShape, Method
from benchmarks.codec.methods import all_methods
from tests.benchmarks.codec.kv import make_kv


def _bits(method: Method, k: torch.Tensor, v: torch.Tensor) -> float:
    return method.code(k, v).num_bytes * 8 / KVShape.of(k, v).num_values


def _error(method: Method, k: torch.Tensor, v: torch.Tensor) -> float:
    """Root of the mean square, K and V together."""
    coded = method.code(k, v)
    return float(torch.cat([(coded.k.float() - k.float()), (coded.v.float() - v.float())]).square().mean().sqrt())


@pytest.mark.parametrize(
    "method",
    all_methods(None),
    ids=lambda method: method.name,
)
def test_what_comes_back_is_near_what_went_in(method: Method) -> None:
    k, v = make_kv()
    coded = method.code(k, v)
    for restored, values in ((coded.k, k), (coded.v, v)):
        assert float((restored.float() - values.float()).square().mean()) < 0.2 * float(values.float().var())
    assert 0 < coded.num_bytes < 1.1 * KVShape.of(k, v).raw_bytes
    assert coded.encode_s > 0
    assert coded.decode_s > 0


def test_cachegen_stores_what_lmcache_stores() -> None:
    """Of one chunk, bitstreams of 256 tokens and of the other 44."""
    k, v = make_kv(num_tokens=300)
    shape = KVShape.of(k, v)
    parts = CacheGen(16).encode(k, v)
    channels = shape.num_layers * shape.num_heads * shape.k_head_dim
    assert len(parts) == 2 * 6  # of K and of V
    for largest, tables, *streams in (parts[:6], parts[6:]):
        assert len(largest) == 2 * shape.num_layers * 300
        assert len(tables) == 2 * channels * (16 + 1)
        assert [len(lengths) for lengths in streams[::2]] == [4 * channels] * 2
        for coded, tokens in zip(streams[1::2], (256, 44), strict=True):
            assert len(coded) <= channels * (tokens * 4 // 8 + 2)


def _turboquant(k: Coder, v: Coder, exact_layers: int = 0) -> TurboQuant:
    return TurboQuant("", "", (k, v), exact_layers)


def test_turboquant_errs_as_lloyd_and_max_do_on_normal_values() -> None:
    """Max (1960): a standard normal variable in 2, 3 and 4 bits has a squared error of 0.1175, 0.0345 and 0.0095."""
    k, v = make_kv(num_tokens=640)
    for bits, expected in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        error = _error(_turboquant(Coder("mse", bits), Coder("mse", bits)), k, v) ** 2
        assert error / float(torch.cat([k, v]).float().square().mean()) == pytest.approx(expected, rel=0.15)
