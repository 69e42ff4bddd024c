"""Methods that are fitted to attention: Block-GTQ and OSCAR."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from benchmarks.codec.baselines.attention import SINK_TOKENS, AttentionStatistics, gather
from benchmarks.codec.baselines.block_gtq import BlockGtq, allocate, block_gtq_methods, rope_pairs
from benchmarks.codec.baselines.oscar import Oscar, oscar_methods
from benchmarks.codec.kv_model import KVModel
from sgl_kvfetch.codec.quant.rope import Rope
from tests.benchmarks.codec.kv import make_kv

LAYERS, HEADS, DIM = 3, 2, 32
ROPE = Rope(inv_freq=tuple(0.5**i for i in range(DIM // 2)))


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> KVModel:
    return KVModel(str(tiny_llama))


def _statistics(seed: int = 1) -> AttentionStatistics:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, LAYERS, HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    queries, values = factors @ factors.mT
    return AttentionStatistics(ROPE, queries, torch.rand(LAYERS, HEADS, DIM, generator=generator).double(), values)


@pytest.mark.parametrize("method", [*block_gtq_methods(), *oscar_methods()], ids=lambda method: method.name)
def test_what_comes_back_is_near_what_went_in(method: BlockGtq | Oscar) -> None:
    method.statistics = _statistics()
    k, v = make_kv(layers=LAYERS, heads=HEADS, dim=DIM)
    coded = method.code(k, v)
    for restored, values in ((coded.k, k), (coded.v, v)):
        assert float((restored.float() - values.float()).square().mean()) < 0.25 * float(values.float().square().mean())


def test_statistics_are_those_of_the_models_attention(model: KVModel) -> None:
    torch.manual_seed(2)
    windows = [torch.randint(3, 2048, (count,)) for count in (40, 60)]
    usual = model.model.config._attn_implementation
    statistics = gather(model, windows)
    assert model.model.config._attn_implementation == usual
    keys = []
    for ids in windows:
        k, _ = model.kv(ids)
        keys.append(k[SINK_TOKENS:].double().square().mean(0))
    torch.testing.assert_close(statistics.keys, torch.stack(keys).mean(0))
    # A query's norm does not depend on the rotation, so the first layer's follow from the weights.
    norms = []
    layer = model.model.model.layers[0]
    for ids in windows:
        hidden = layer.input_layernorm(model.model.model.embed_tokens(ids))
        q = layer.self_attn.q_proj(hidden)[SINK_TOKENS:].double().unflatten(1, (model.num_heads, -1, model.k_head_dim))
        norms.append(q.square().sum(-1).mean((0, 2)))
    traces = statistics.queries[0].diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(traces, torch.stack(norms).mean(0))
    # The weights of tokens sum to 1: no value's second moment exceeds the largest value's.
    assert float(statistics.values[0].diagonal(dim1=1, dim2=2).sum(1).max()) < float(
        max(model.kv(ids)[1].double().square().sum(-1).max() for ids in windows)
    )


def test_bits_go_where_they_lower_the_error_most() -> None:
    energies = torch.tensor([100.0, 9.0, 1.0, 0.01])
    best = min(
        (bits for bits in itertools.product(range(1, 9), repeat=4) if sum(bits) == 12),
        key=lambda bits: sum(e * 4.0**-b for e, b in zip(energies.tolist(), bits, strict=True)),
    )
    assert allocate(energies, 12).tolist() == list(best)
    assert allocate(energies, 100).tolist() == [8] * 4


def test_pairs_are_those_that_the_rotation_turns() -> None:
    assert rope_pairs(Rope(inv_freq=(1.0, 0.5)), 6).tolist() == [[0, 2], [1, 3], [4, 5]]
    assert rope_pairs(Rope(inv_freq=(1.0, 0.5), interleaved=True), 4).tolist() == [[0, 1], [2, 3]]


def test_block_gtq_counts_bits_norms_and_the_exact_token() -> None:
    statistics = _statistics()
    k, v = make_kv(layers=LAYERS, heads=HEADS, dim=DIM)
    plain, with_sink = BlockGtq(3, 2, 0), BlockGtq(3, 2, 1)
    plain.statistics = with_sink.statistics = statistics
    energies = (statistics.queries.diagonal(dim1=-2, dim2=-1) + statistics.keys) / 2
    pairs = rope_pairs(ROPE, DIM)
    widths = [len(allocate(head[pairs].sum(1), 3 * len(pairs)).unique()) for layer in energies for head in layer]
    token_bits = LAYERS * HEADS * DIM * (3 + 2) + 16 * (sum(widths) + LAYERS * HEADS)
    assert plain.code(k, v).num_bytes * 8 == pytest.approx(token_bits * len(k), rel=0.001)
    restored = with_sink.code(k, v)
    assert torch.equal(restored.k[0], k[0])
    assert not torch.equal(restored.k[1], k[1])


def test_oscar_counts_the_first_and_the_last_tokens_which_are_exact() -> None:
    k, v = make_kv(num_tokens=400, layers=LAYERS, heads=HEADS, dim=DIM)
    method = Oscar(2)
    method.statistics = _statistics()
    restored = method.code(k, v)
    for tokens in (slice(0, 64), slice(144, 400)):
        assert torch.equal(restored.k[tokens], k[tokens])
        assert torch.equal(restored.v[tokens], v[tokens])
    coded = 400 - 64 - 256
    bits = coded * (2 + 32 / DIM) + (400 - coded) * 16
    assert restored.num_bytes * 8 == math.ceil(bits * 2 * LAYERS * HEADS * DIM)
