"""A small run of each benchmark that needs no SGLang server: it ends, and writes figures that make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import data_plane, restoring, writing
from benchmarks.real_model import prose
from benchmarks.soak.__main__ import main as soak
from tests.benchmarks.conftest import Run


@pytest.mark.slow
def test_data_plane(run: Run) -> None:
    coded = run(data_plane.main, "--tokens", 256, "--rounds", 2)["coded"]
    assert coded["num_cells"] == 11 * 4
    assert 256 * 32 * 8 * 256 * 1 / 8 < coded["wire_bytes"] < 256 * 32 * 8 * 256 * 2 / 8
    assert all(figure > 0 for each in coded["rounds"] for name, figure in each.items() if name.endswith("_s"))


@pytest.mark.slow
def test_writing(run: Run) -> None:
    rows = run(writing.main, "--tokens", 256, "--layers", 2, "--rounds", 2)["writes"]
    assert [(row["codec"], row["round"]) for row in rows] == [("ans", 1), ("ans", 2), ("raw", 1), ("raw", 2)]
    assert all(row["raw_mb_per_s"] > 0 and row["data_plane_cpu_s_per_gb"] > 0 for row in rows)


def test_restoring() -> None:
    bytes_s, share = restoring.measure("exact", "ans", 16, 1)
    assert bytes_s > 0
    assert 0.6 < share < 0.7


@pytest.mark.slow
def test_soak(run: Run) -> None:
    sizes = ["--minutes", 0.4, "--clients", 8, "--slow-readers", 8, "--capacity", 32, "--orphan-age", 5]
    found = run(soak, *sizes, "--longest-lookup", 20)
    assert found["problems"] == []
    assert found["disturbances"]["killed"] > 0
    assert found["disturbances"]["full"] > 0
    for operation, result in (("read", "hit"), ("write", "done"), ("replace", "done"), ("delete", "done")):
        assert found["outcomes"][operation][result] > 0


def test_real_model(real_model: Path) -> None:
    """It was converted well, or it would not know."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    tokens = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=1)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris"
    assert prose().startswith('The "assert" statement')
