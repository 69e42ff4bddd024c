"""The model of a load on a GPU: what it says of what was measured, and the page that has its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_model

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_what_was_measured_is_predicted_within_a_fifth() -> None:
    found = list(gpu_model.rows())
    assert len(found) == 39
    missed = [name for name, predicted, measured in found if abs(predicted / measured - 1) > 0.2]
    assert missed == ["a load, 4 x 256 MiB"]  # the page says so


def test_the_page_has_rows_of_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_model.main() == 0
    printed = {*capsys.readouterr().out.splitlines()}
    tables = [
        part
        for part in PAGE.read_text().split("\n\n")
        if part.startswith(("| milliseconds", "| not measured", "| a load, ms", "| first token, ms"))
    ]
    assert len(tables) == 5
    for table in tables:
        assert {*table.splitlines()} <= printed


def test_what_is_at_best_is_not_slower() -> None:
    assert all(best <= worst for _, best, worst in gpu_model.predictions())
