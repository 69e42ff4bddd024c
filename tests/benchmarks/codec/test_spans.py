from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.codec.spans import (
    LARGER,
    Point,
    Shape,
    Span,
    Variant,
    at_kl,
    main,
    multiply_adds,
    profile_bytes,
    variants_of,
)
from harness.models import make_tiny_llama
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.types import CellGrid
from tests.codec.quant.profiles import make_profile, place_of

SHAPE = Shape("numbers", num_layers=5, num_heads=4, k_head_dim=16, v_head_dim=8)


def test_figures_are_read_off_between_two_points() -> None:
    points = [Point(1, 1e-5, 3.0, 0.9), Point(4, 1e-3, 1.0, 0.5), Point(16, 1e-2, 0.5, 0.1)]
    found = at_kl(points, 1e-4)
    assert found is not None
    assert (found.step, found.kl, found.bits, found.integers) == pytest.approx((2, 1e-4, 2.0, 0.7))
    assert [p and p.bits for p in (at_kl(points, kl) for kl in (1e-5, 1e-2))] == pytest.approx([3.0, 0.5])


@pytest.mark.parametrize("span", [Span(1, None), Span(3, 2), Span(3, None)], ids=str)
def test_the_price_is_that_of_a_profile(span: Span) -> None:
    grid = span.grid(SHAPE)
    profile = make_profile(
        num_layers=5, head_dim=16, v_head_dim=8, cell_layers=grid.cell_layers, cell_heads=grid.cell_heads
    )
    tensors = [x for cell in profile.cells.values() for x in vars(cell).values()]
    assert profile_bytes(SHAPE, grid) == sum(x.nbytes for x in tensors)
    quantiser = KltQuantiser(profile, step=1e-3)  # so fine that all coefficients are kept
    matrices = [quantiser.inverse_of(place_of(profile, key, 1)).matrix for key in profile.cells]
    integers = sum(quantiser.coefficient_shares)
    by_matrix = sum(m.numel() for m in matrices) / sum(m.shape[1] for m in matrices)
    # Cells of other sizes have other shares of wide coefficients.
    assert multiply_adds(SHAPE, grid, integers) == pytest.approx(by_matrix, rel=0.1)


def test_spans_hold_the_chosen_one_with_and_without_its_extras() -> None:
    smollm2 = Shape("SmolLM2", 30, 3, 64, 64)
    assert [str(variant) for variant in variants_of(smollm2)] == [
        "1 layer, all heads",
        "3 layers, one head",
        "3 layers, all heads (chosen)",
        "6 layers, all heads",
        "3 layers, all heads, without sensitivity",
        "3 layers, all heads, without sinks",
    ]
    chosen = [variant for variant in variants_of(LARGER[0]) if variant.is_chosen]
    assert chosen == [Variant(Span(3, 2), is_chosen=True)]
    assert chosen[0].span.grid(LARGER[0]) == CellGrid(32, 8, 3, 2)
    assert Span(3, 1) not in {variant.span for variant in variants_of(Shape("one head", 18, 1, 256, 256))}


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_llama(tmp_path / "tiny", num_layers=4, hidden_size=64, head_dim=32, vocab_size=256)
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(" ".join(f"w{word}" for word in random.Random(0).choices(range(3, 256), k=4000)))
    args = f"--model {model} --text {text} --windows 1 --calibrate-windows 10 --context 128 --continuation 32"
    assert main([*args.split(), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 layers, one head" in said
    assert re.search(r"For Qwen3-32B, kvfetch calibrate takes 3 layers, 2 heads: .* MB, 1,5\d\d if it", said)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert [row["is_chosen"] for row in rows.values()].count(True) == 1
    for row in rows.values():
        bits = [point["bits"] for point in row["points"]]
        assert bits == sorted(bits, reverse=True)
    narrow, wide = (rows[f"{layers}, all heads"] for layers in ("1 layer", "6 layers"))
    assert narrow["price"]["tiny"]["profile_bytes"] < wide["price"]["tiny"]["profile_bytes"]
    assert set(wide["price"]) == {"tiny", "Llama-3.1-8B", "Qwen3-32B"}
