from __future__ import annotations

import pytest
import torch

from benchmarks.codec.baselines.cachegen import CacheGen
from benchmarks.codec.baselines.kivi import Kivi
from benchmarks.codec.baselines.kvfetcher import kvfetcher_methods
from benchmarks.codec.baselines.sink import WithExactSink
from benchmarks.codec.method import Method
from tests.benchmarks.codec.kv import make_kv


def _with_sink() -> tuple[torch.Tensor, torch.Tensor]:
    """KV whose first token has some values that are far out."""
    k, v = make_kv()
    for values in (k, v):
        values[0, :, :, 3] *= 200
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
    k, v = _with_sink()
    inner = Kivi(4)  # a scale of K is that of 32 tokens
    coded = WithExactSink(inner).code(k, v)
    k_error, plain_error = ((x[1:32].float() - k[1:32].float()).abs().max() for x in (coded.k, inner.code(k, v).k))
    assert k_error < 0.5 < plain_error
    assert torch.equal(coded.k[:1], k[:1])
    assert torch.equal(coded.v[:1], v[:1])
