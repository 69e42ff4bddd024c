"""What the figures of `benchmarks.codec` count."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.measure import measure
from benchmarks.codec.methods import CacheGen, Coded, Method

CONTEXT, CONTINUATION = 64, 20


class _Noisy(Method):
    """Exact values in 3 bytes each, with noise on what comes back."""

    name = "noisy"

    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        torch.manual_seed(0)
        noisy_k, noisy_v = ((x.float() + 0.3 * torch.randn(x.shape)).bfloat16() for x in (k, v))
        return Coded(noisy_k, noisy_v, 3 * (k.numel() + v.numel()))


def test_figures_are_those_of_the_whole_model(tiny_llama: Path) -> None:
    """Against a forward pass over the whole window, without a cache, for the reference; and by hand for the rest."""
    torch.manual_seed(5)
    model, method = KVModel(str(tiny_llama)), _Noisy()
    windows = [torch.randint(3, 2048, (CONTEXT + CONTINUATION + 1,)) for _ in range(2)]
    nll, (row,) = measure(model, windows, CONTEXT, [method])
    assert (row.bits_per_value.mean, row.bits_per_value.margin) == (24, 0)
    nlls, kls, changes = [], [], []
    for ids in windows:
        with torch.no_grad():
            logits = model.model(ids[None]).logits[0, CONTEXT:-1]
        p = torch.log_softmax(logits.double(), -1)
        nlls.append(float(-p.gather(1, ids[CONTEXT + 1 :, None]).mean()))
        coded = method.code(*(x.bfloat16() for x in model.kv(ids[:CONTEXT])))
        q = model.log_probabilities(coded.k, coded.v, ids[CONTEXT:-1]).double()
        kls.append(float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")))
        changes.append(float(-q.gather(1, ids[CONTEXT + 1 :, None]).mean()) - nlls[-1])
    # The reference is of bfloat16 KV, the forward pass of float32.
    assert nll.mean == pytest.approx(sum(nlls) / 2, rel=0.01)
    assert row.kl.mean == pytest.approx(sum(kls) / 2, rel=0.1)
    assert row.dnll.mean == pytest.approx(sum(changes) / 2, abs=0.05)


def test_all_that_lmcache_would_store_is_counted() -> None:
    """Of values with one magnitude: each is in the lowest bin or in the highest, half of the time."""
    signs = torch.ones((300, 3, 2, 32), dtype=torch.bfloat16)
    signs[::2] = -1
    coded = CacheGen(16).code(signs, signs)
    assert torch.equal(coded.k, signs)
    channels, rare = 3 * 2 * 32, math.log2(0xFFFF / (0xFFFF - 16)) + 1  # bits a symbol, of nearly half of the range
    streams = sum(4 + math.ceil((tokens * rare + 1) / 8) for tokens in (256, 44))
    assert coded.num_bytes == 2 * (2 * 3 * 300 + channels * (2 * 17 + streams))
