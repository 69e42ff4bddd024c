from __future__ import annotations

import pytest
import torch

from benchmarks.codec.baselines import baselines
from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.kivi import Kivi
from benchmarks.codec.baselines.kvfetcher import kvfetcher_methods
from benchmarks.codec.baselines.sink import WithExactSink
from benchmarks.codec.method import Method
from tests.benchmarks.codec.kv import make_kv


def _with_sink(num_tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """KV whose first tokens have some values that are far out."""
    k, v = make_kv()
    for values in (k, v):
        values[:num_tokens, :, :, 3] *= 200
    return k, v


@pytest.mark.parametrize("inner", [CacheGen(2048, 16), *kvfetcher_methods((256, 16))], ids=lambda method: method.name)
def test_the_first_token_is_exact_and_the_others_are_as_without(inner: Method) -> None:
    k, v = _with_sink()
    plain, coded = inner.code(k, v), WithExactSink(inner).code(k, v)
    for values, restored, without in ((k, coded.k, plain.k), (v, coded.v, plain.v)):
        assert torch.equal(restored[0], values[0])
        assert not torch.equal(without[0], values[0])
        assert torch.equal(restored[1:], without[1:])


def test_the_exact_token_is_counted() -> None:
    k, v = make_kv()
    k[0], v[0] = k[1], v[1]  # what the inner method sees in any case
    inner = CacheGen(2048, 16)
    exact_bytes = 2 * (k[0].numel() + v[0].numel())
    assert WithExactSink(inner).code(k, v).num_bytes == inner.code(k, v).num_bytes + exact_bytes


def test_a_sink_widens_no_scale_of_other_tokens() -> None:
    k, v = _with_sink(num_tokens=2)
    inner = Kivi(4)  # a scale of K is that of 32 tokens
    coded = WithExactSink(inner, num_tokens=2).code(k, v)
    k_error, plain_error = ((x[2:32].float() - k[2:32].float()).abs().max() for x in (coded.k, inner.code(k, v).k))
    assert k_error < 0.5 < plain_error
    assert torch.equal(coded.k[:2], k[:2])
    assert torch.equal(coded.v[:2], v[:2])


def test_a_context_of_sinks_alone_is_exact() -> None:
    k, v = (values[:1] for values in make_kv())
    coded = WithExactSink(CacheGen(2048, 16)).code(k, v)
    assert torch.equal(coded.k, k)
    assert torch.equal(coded.v, v)


def test_which_methods_have_it() -> None:
    names = [method.name for method in baselines() if method.name.endswith("+sink")]
    assert names == [
        *("cachegen-32/2048+sink", "cachegen-16/2048+sink", "cachegen-8/2048+sink"),
        *("kvfetcher-256+sink", "kvfetcher-32+sink", "kvfetcher-16+sink"),
    ]
