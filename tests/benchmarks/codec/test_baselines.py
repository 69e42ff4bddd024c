from __future__ import annotations

import pytest
import torch

from benchmarks.codec.baselines import baselines
from benchmarks.codec.baselines.affine import pack, unpack
from benchmarks.codec.baselines.bins import lmcache_bins
from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.fp8 import AsymK16V8
from benchmarks.codec.baselines.kivi import Kivi
from benchmarks.codec.baselines.llm265 import Llm265
from benchmarks.codec.baselines.mean import Mean
from benchmarks.codec.baselines.saw_int4 import SawInt4
from benchmarks.codec.baselines.shadowserve import ShadowServe
from benchmarks.codec.baselines.turboquant import turboquant_methods
from benchmarks.codec.method import KVShape, Method
from benchmarks.codec.ours import our_methods
from tests.benchmarks.codec.kv import make_kv


def _bits(method: Method, k: torch.Tensor, v: torch.Tensor) -> float:
    return method.code(k, v).num_bytes * 8 / KVShape.of(k, v).num_values


def _error(method: Method, k: torch.Tensor, v: torch.Tensor) -> float:
    """Root of the mean square, K and V together."""
    coded = method.code(k, v)
    return float(torch.cat([(coded.k.float() - k.float()), (coded.v.float() - v.float())]).square().mean().sqrt())


@pytest.mark.parametrize(
    "method",
    [method for method in (*our_methods(None), *baselines()) if not isinstance(method, Mean)],
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


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (CacheGen(256, 8), CacheGen(256, 32)),
        (ShadowServe(8), ShadowServe(32)),
        (Llm265(26), Llm265(8)),
        (Kivi(2), Kivi(4)),
    ],
    ids=lambda method: method.name,
)
def test_more_bits_give_less_error(coarse: Method, fine: Method) -> None:
    k, v = make_kv()
    assert _bits(coarse, k, v) < _bits(fine, k, v)
    assert _error(coarse, k, v) > 1.5 * _error(fine, k, v)


def test_lmcache_bins() -> None:
    assert lmcache_bins("k", 6) == lmcache_bins("v", 6) == [32] * 6
    assert lmcache_bins("k", 12) == [32] * 10 + [16] * 2
    assert lmcache_bins("v", 12) == [32] * 2 + [16] * 10


def test_cachegen_stores_what_lmcache_stores() -> None:
    k, v = make_kv(num_tokens=300)
    shape = KVShape.of(k, v)
    parts = CacheGen(256, 16).encode(k, v)
    channels = shape.num_layers * shape.num_heads * shape.k_head_dim
    per_chunk = [parts[i : i + 4] for i in range(0, len(parts), 4)]
    assert len(per_chunk) == 4  # chunks of 256 and 44 tokens, of K and of V
    for (largest, tables, lengths, streams), tokens in zip(per_chunk, (256, 44, 256, 44), strict=True):
        assert len(largest) == 2 * shape.num_layers * tokens
        assert len(tables) == 2 * channels * (16 + 1)
        assert len(lengths) == 4 * channels
        assert len(streams) <= channels * (tokens * 4 // 8 + 2)


@pytest.mark.parametrize("num_tokens", [64, 128, 320])
def test_kivi_keeps_its_residual(num_tokens: int) -> None:
    k, v = make_kv(num_tokens)
    coded = Kivi(2).code(k, v)
    k_coded, v_coded = num_tokens // 128 * 128, max(0, num_tokens - 128)
    assert torch.equal(coded.k[k_coded:], k[k_coded:])
    assert torch.equal(coded.v[v_coded:], v[v_coded:])
    for restored, values, count in ((coded.k, k, k_coded), (coded.v, v, v_coded)):
        assert not count or not torch.equal(restored[:count], values[:count])
    per_token = 3 * 2 * 32
    coded_bits = (k_coded + v_coded) * per_token * (2 + 2 * 16 / 32)
    raw_bits = (2 * num_tokens - k_coded - v_coded) * per_token * 16
    assert coded.num_bytes * 8 == coded_bits + raw_bits


def test_saw_int4_spreads_outlier_channels_of_k() -> None:
    k, v = make_kv()
    k[..., 3] += 50.0
    v[..., 3] += 50.0
    plain_v, rotated_v = SawInt4(rotate_v=False), SawInt4(rotate_v=True)
    assert _bits(plain_v, k, v) == 4 + 2 * 16 / 32
    assert _error(rotated_v, k, v) < 0.8 * _error(plain_v, k, v)
    k_error = (plain_v.code(k, v).k.float() - k.float()).square().mean()
    v_error = (plain_v.code(k, v).v.float() - v.float()).square().mean()
    assert k_error < 0.7 * v_error


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_have_no_gaps(bits: int) -> None:
    integers = torch.randint(0, 1 << bits, (3, 37), generator=torch.Generator().manual_seed(bits))
    packed = pack(integers, bits)
    assert len(packed) == -(-3 * 37 * bits // 8)
    assert torch.equal(unpack(packed, bits, 3 * 37).view(3, 37), integers.to(torch.uint8))


def test_turboquant_counts_norms_scales_and_exact_layers() -> None:
    k, v = make_kv(layers=6)
    methods = {method.name: method for method in turboquant_methods()}
    dim = k.shape[-1]
    assert _bits(methods["turboquant-mse-2"], k, v) == 2 + 16 / dim
    coded = ((3 + 16 / dim) + (4 + 32 / dim)) / 2
    assert _bits(methods["turboquant-k3v4/all"], k, v) == coded
    assert _bits(methods["turboquant-k3v4"], k, v) == (coded * 2 + 16 * 4) / 6
    restored = methods["turboquant-3bit"].code(k, v)
    for layers in (slice(0, 2), slice(4, 6)):
        assert torch.equal(restored.k[:, layers], k[:, layers])
        assert torch.equal(restored.v[:, layers], v[:, layers])


def test_turboquant_errs_as_lloyd_and_max_do_on_normal_values() -> None:
    """Max (1960): a standard normal variable in 2, 3 and 4 bits has a squared error of 0.1175, 0.0345 and 0.0095."""
    k, v = make_kv(num_tokens=640)
    methods = {method.name: method for method in turboquant_methods()}
    for bits, expected in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        error = _error(methods[f"turboquant-mse-{bits}"], k, v) ** 2
        assert error / float(torch.cat([k, v]).float().square().mean()) == pytest.approx(expected, rel=0.15)


def test_k16_v8_keeps_k_and_scales_v() -> None:
    k, v = make_kv(num_tokens=300)
    restored = AsymK16V8().code(k, (v * 1000).to(torch.bfloat16))
    assert torch.equal(restored.k, k)
    largest = float(v.float().abs().max()) * 1000
    error = (restored.v.float() - v.float() * 1000).abs()
    assert bool((error <= v.float().abs() * 1000 / 14 + largest / 448 / 100).all())
    assert restored.num_bytes == 2 * k.numel() + v.numel() + 2 * 4  # chunks of 256 and 44 tokens
