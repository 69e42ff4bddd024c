from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.codec.measure import measure
from benchmarks.codec.method import KVShape, Method
from benchmarks.codec.ours import our_methods
from benchmarks.stats import estimate
from sgl_kvfetch.codec.calibrate.model import KVModel
from sgl_kvfetch.errors import UnsupportedError

CONTEXT, CONTINUATION = 64, 20


class _Noisy(Method):
    """Exact values in 3 bytes each, with noise on what comes back."""

    name, source, family = "noisy", "the test", "noisy"

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.values: tuple[torch.Tensor, torch.Tensor] | None = None

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        self.values = (k, v)
        return [bytes(3 * k.numel()), bytes(3 * v.numel())]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.values is not None
        torch.manual_seed(0)
        k, v = ((x.float() + self.noise * torch.randn(x.shape)).bfloat16() for x in self.values)
        return k, v


class _Refusing(_Noisy):
    name = "refusing"

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        raise UnsupportedError("not of this shape")


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> KVModel:
    return KVModel(str(tiny_llama))


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randint(3, 2048, (CONTEXT + CONTINUATION + 1,)) for _ in range(2)]


def test_exact_kv_changes_nothing(model: KVModel, windows: list[torch.Tensor]) -> None:
    seen: list[str] = []
    methods = our_methods(None)[:2]
    measured = measure(model, windows, CONTEXT, methods, seen.append)
    assert seen == ["exact/hevc", "exact/zstd"] * 2
    assert measured.shape == KVShape(CONTEXT, 4, 2, 64, 64)
    for row in measured.rows:
        assert abs(row.kl.mean) < 1e-9
        assert row.dnll.mean == 0
        assert row.top1.mean == 1
        assert row.ratio == pytest.approx(16 / row.bits_per_value.mean)
        assert row.encode_mb_s > 0
        assert row.decode_mb_s > 0


def test_figures_are_those_of_the_whole_model(model: KVModel, windows: list[torch.Tensor]) -> None:
    """Against a forward pass over the whole window, without a cache, for the reference; and by hand for the rest."""
    method = _Noisy(0.3)
    measured = measure(model, windows, CONTEXT, [method])
    (row,) = measured.rows
    assert row.bits_per_value.mean == 24
    assert row.bits_per_value.margin == 0
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
    assert measured.nll.mean == pytest.approx(sum(nlls) / 2, rel=0.01)
    assert row.kl.mean == pytest.approx(sum(kls) / 2, rel=0.1)
    assert row.dnll.mean == pytest.approx(sum(changes) / 2, abs=0.05)
    assert row.top1.mean < 1


def test_a_method_that_has_no_form_for_this_kv_is_left_out(model: KVModel, windows: list[torch.Tensor]) -> None:
    measured = measure(model, windows, CONTEXT, [_Refusing(0.0), _Noisy(0.1)])
    assert [row.name for row in measured.rows] == ["noisy"]
    assert measured.left_out == {"refusing": "not of this shape"}


def test_interval() -> None:
    # 1, 2, 3, 4: deviation sqrt(5/3), t of three degrees 3.182.
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.margin == pytest.approx(3.182 * math.sqrt(5 / 3) / 2)
    assert found.interval == pytest.approx((2.5 - 2.054, 2.5 + 2.054), abs=1e-3)
    assert estimate([1.0]).interval is None
    assert estimate([float(i % 2) for i in range(100)]).margin == pytest.approx(1.984 * 0.5025 / 10, rel=1e-3)
