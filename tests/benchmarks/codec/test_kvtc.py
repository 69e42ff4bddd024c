from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.codec.baselines.kvtc.allocation import Errors, allocate
from benchmarks.codec.baselines.kvtc.calibration import Fit, calibrate
from benchmarks.codec.baselines.kvtc.components import principal_components
from benchmarks.codec.baselines.kvtc.groups import (
    KINDS,
    Group,
    bits_of,
    dequantise,
    quantise,
)
from benchmarks.codec.baselines.kvtc.method import Kvtc
from benchmarks.codec.kv_model import KVModel

RATIOS = (4, 8, 32)
FEATURES = 4 * 2 * 64  # the tiny model's layers, heads and head dimension


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_fp8_errs_by_a_share_of_each_value() -> None:
    values = _randn(40, 64) * 3 + 5
    restored = dequantise(*quantise(values, "fp8"), "fp8")
    smallest, largest = values.aminmax(dim=1, keepdim=True)
    centred = values - (largest + smallest) / 2
    # Three bits of mantissa; below that float16's rounding of scale and shift.
    assert bool(((restored - values).abs() <= centred.abs() / 16 + 0.01).all())


def _every_choice(errors: Errors, budget: int, first: int = 0) -> Iterator[float]:
    """The error of each way to group and drop the coefficients from ``first`` on within a budget."""
    if first == len(errors.dropped):
        yield 0.0
        return
    for rest in _every_choice(errors, budget, first + 1):
        yield errors.dropped[first] + rest
    for (size, kind), found in errors.grouped.items():
        if first < len(found) and bits_of(size, kind) <= budget:
            for rest in _every_choice(errors, budget - bits_of(size, kind), first + size):
                yield found[first] + rest


def _error_of(errors: Errors, groups: tuple[Group, ...]) -> float:
    total = errors.dropped.sum()
    for group in groups:
        total += errors.grouped[group.size, group.kind][group.first] - errors.dropped[group.first : group.end].sum()
    return float(total)


def test_no_other_allocation_errs_less() -> None:
    rng = np.random.default_rng(5)
    dropped = rng.random(5) * 3
    sizes = (1, 2, 3)
    grouped = {(size, kind): rng.random(6 - size) * size / bits_of(size, kind) for size in sizes for kind in KINDS}
    errors = Errors(dropped, grouped)
    budgets = (20, 34, 61, 100, 140, 400)
    for budget, groups in zip(budgets, allocate(errors, budgets), strict=True):
        assert sum(bits_of(group.size, group.kind) for group in groups) <= budget
        assert all(group.end <= following.first for group, following in pairwise(groups))
        assert _error_of(errors, groups) == pytest.approx(min(_every_choice(errors, budget)))


@pytest.mark.parametrize("num_rows", [30, 200])
@pytest.mark.parametrize("exact_size", [8192, 10])
def test_components_of_few_and_of_many_rows(num_rows: int, exact_size: int) -> None:
    """From either Gram matrix and from the randomised SVD."""
    samples = _randn(num_rows, 12) @ (torch.linspace(4, 0.5, 12)[:, None] * _randn(12, 60)) + 3
    found = principal_components(samples.clone(), max_rank=12, exact_size=exact_size)
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(12), atol=1e-4, rtol=0)
    coefficients = found.coefficients(samples, 12)
    variances = coefficients.var(0)
    assert torch.equal(variances, variances.sort(descending=True).values)
    torch.testing.assert_close(found.restore(coefficients), samples, atol=1e-2, rtol=1e-3)
    fewer = found.restore(found.coefficients(samples, 4))
    lost = variances[4:].sum() * (num_rows - 1)
    torch.testing.assert_close((fewer - samples).square().sum(), lost, atol=0.1, rtol=1e-2)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> KVModel:
    return KVModel(str(tiny_llama))


@pytest.fixture(scope="module")
def fit(model: KVModel) -> Fit:
    ids = torch.randint(3, 2048, (3, 300), generator=torch.Generator().manual_seed(1))
    return calibrate(model, list(ids), RATIOS)


@pytest.fixture(scope="module")
def kv(model: KVModel) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = model.kv(torch.randint(3, 2048, (200,), generator=torch.Generator().manual_seed(2)))
    return k.bfloat16(), v.bfloat16()


def _method(fit: Fit, ratio: int, recent_tokens: int = 128) -> Kvtc:
    method = Kvtc(ratio, recent_tokens)
    method.fit = fit
    return method


@pytest.mark.parametrize("recent_tokens", [0, 128])
def test_sinks_and_recent_tokens_are_exact_and_counted(
    fit: Fit, kv: tuple[torch.Tensor, torch.Tensor], recent_tokens: int
) -> None:
    method = _method(fit, 8, recent_tokens)
    coded = method.code(*kv)
    end = 200 - recent_tokens
    for restored, values in ((coded.k, kv[0]), (coded.v, kv[1])):
        assert torch.equal(restored[:4], values[:4])
        assert torch.equal(restored[end:], values[end:])
        assert not (restored[4:end] == values[4:end]).all(1).all(1).all(1).any()
    parts = method.encode(*kv)
    assert coded.num_bytes == sum(map(len, parts))
    assert [len(part) for part in parts[:4]] == [2 * FEATURES * 4, 2 * FEATURES * recent_tokens] * 2
    assert sum(map(len, parts[4:])) * 8 < 1.1 * (end - 4) * 2 * FEATURES * 16 / 8
