from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.codec import lossless
from benchmarks.codec.lossless import Fields, adaptive_bits, before, codes
from tests.benchmarks.codec.kv import make_kv
from tests.benchmarks.conftest import Run


def test_fields_are_the_bits_of_bfloat16() -> None:
    fields = Fields.of(torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16).view(1, 1, 1, 3))
    assert fields.sign.ravel().tolist() == [0, 1, 0]
    assert fields.exponent.ravel().tolist() == [127, 128, 0]
    assert fields.mantissa.ravel().tolist() == [0, 32, 0]


def test_an_adaptive_code_costs_what_it_costs_symbol_by_symbol() -> None:
    generator = np.random.default_rng(4)
    symbols = generator.integers(0, 5, (30, 2, 4))
    contexts = np.broadcast_to(np.arange(4) % 3, symbols.shape)
    expected = 16.0 * sum(len(np.unique(symbols[:, layer])) for layer in range(2))
    for layer in range(2):
        usual = Counter(symbols[:, layer].ravel().tolist())
        seen: dict[int, Counter[int]] = {context: Counter() for context in range(3)}
        for token, channel in np.ndindex(30, 4):
            symbol, counts = int(symbols[token, layer, channel]), seen[channel % 3]
            share = (counts[symbol] + 8.0 * usual[symbol] / 120) / (counts.total() + 8.0)
            expected -= math.log2(share)
            counts[symbol] += 1
    assert adaptive_bits(symbols, contexts) == pytest.approx(expected)


def test_contexts_are_of_the_past_alone() -> None:
    x = np.arange(24).reshape(2, 3, 4) + 1
    assert before(x, 1)[:, 0].tolist() == [[0] * 4] * 2
    assert np.array_equal(before(x, 0)[1], x[0])


def test_codes_of_known_values() -> None:
    """Exponents of 17 kinds alike: SplitZip's codebook lacks the rarest one."""
    exponent = np.repeat(np.arange(100, 117), [64] * 16 + [1])[:, None, None]
    fields = Fields(np.zeros_like(exponent), exponent, np.zeros_like(exponent))
    length = codes()["SplitZip: 4 bits for the 16 most frequent exponents"](fields)
    assert length == 12 * exponent.size + 24 + 16 * 8
    for name, code in codes().items():
        k, _ = make_kv(64)
        assert 8 < code(Fields.of(k)) / k.numel() < 16, name


def test_lossless(run: Run, tiny_llama: Path, text: Path) -> None:
    rows = run(lossless.main, "--model", tiny_llama, "--text", text, "--windows", 2, "--context", 128)["rows"]
    assert [row["name"] for row in rows] == list(codes())
    for row in rows:
        assert row["bits"]["mean"] == pytest.approx((row["k_bits"]["mean"] + row["v_bits"]["mean"]) / 2)
