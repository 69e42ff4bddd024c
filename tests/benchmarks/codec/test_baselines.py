from __future__ import annotations

import pytest
import torch

from benchmarks.codec.baselines.affine import pack, unpack
from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.kivi import Kivi
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


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (CacheGen(8), CacheGen(32)),
        (Kivi(2), Kivi(4)),
    ],
    ids=lambda method: method.name,
)
def test_more_bits_give_less_error(coarse: Method, fine: Method) -> None:
    k, v = make_kv()
    assert _bits(coarse, k, v) < _bits(fine, k, v)
    assert _error(coarse, k, v) > 1.5 * _error(fine, k, v)


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


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_have_no_gaps(bits: int) -> None:
    integers = torch.randint(0, 1 << bits, (3, 37), generator=torch.Generator().manual_seed(bits))
    packed = pack(integers, bits)
    assert len(packed) == -(-3 * 37 * bits // 8)
    assert torch.equal(unpack(packed, bits, 3 * 37).view(3, 37), integers.to(torch.uint8))


def _turboquant(k: Coder, v: Coder, exact_layers: int = 0) -> TurboQuant:
    return TurboQuant("", "", (k, v), exact_layers)


def test_turboquant_counts_norms_scales_and_exact_layers() -> None:
    k, v = make_kv(layers=6)
    dim = k.shape[-1]
    mse, uniform = Coder("mse", 3), Coder("uniform", 4)
    assert _bits(_turboquant(mse, mse), k, v) == 3 + 16 / dim
    coded = ((3 + 16 / dim) + (4 + 32 / dim)) / 2
    assert _bits(_turboquant(mse, uniform), k, v) == coded
    assert _bits(_turboquant(mse, uniform, 2), k, v) == (coded * 2 + 16 * 4) / 6
    restored = _turboquant(mse, uniform, 2).code(k, v)
    for layers in (slice(0, 2), slice(4, 6)):
        assert torch.equal(restored.k[:, layers], k[:, layers])
        assert torch.equal(restored.v[:, layers], v[:, layers])


def test_turboquant_errs_as_lloyd_and_max_do_on_normal_values() -> None:
    """Max (1960): a standard normal variable in 2, 3 and 4 bits has a squared error of 0.1175, 0.0345 and 0.0095."""
    k, v = make_kv(num_tokens=640)
    for bits, expected in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        error = _error(_turboquant(Coder("mse", bits), Coder("mse", bits)), k, v) ** 2
        assert error / float(torch.cat([k, v]).float().square().mean()) == pytest.approx(expected, rel=0.15)
