"""The simulator of fetches that leave levels out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.adaptive import levels
from tests.benchmarks.conftest import Run


def test_policies_are_between_all_levels_and_the_fewest(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "bw.jsonl"
    trace.write_text('{"bw": [6, 3.5, 4]}\n\n{"bw": [0.2, 9]}\n')
    groups = run(levels.main, "--trace", trace, "--random", 3, "--within", 0.2)["groups"]
    assert [(each["links"], each["most_left_out"]) for each in groups] == [
        (name, most) for name in ("bw.jsonl", "3 random links") for most in (1, 2)
    ]
    for each in groups:
        whole, fewest, ours, oracle = each["rows"]
        assert fewest["p95_s"] / whole["p95_s"] == pytest.approx(
            levels.BITS_A_VALUE[2 - each["most_left_out"]] / levels.BITS_A_VALUE[2]
        )
        for row in (ours, oracle):
            assert fewest["in_time"] >= row["in_time"] >= whole["in_time"]
            assert levels.KL[2] <= row["kl"] <= fewest["kl"] * (1 + 1e-9)


@pytest.mark.parametrize(("gbps", "left_out"), [(1000.0, [0]), (0.001, [2]), (4.0, [0, 1])])
def test_a_steady_link_gets_the_levels_that_are_in_time(gbps: float, left_out: list[int]) -> None:
    """4 Gbps bring all levels of a chunk in 0.16 s, and all but one in 0.07."""
    link = levels.Link((gbps * 1e9,), 64)
    ours = levels.fetch(link, levels.in_time(3, 2, 0.1))
    best = levels.oracle(link, 3, 2, 0.1)
    assert set(best.levels) == {3 - count for count in left_out}
    assert ours.kl == pytest.approx(best.kl, rel=0.3)
    unmeasured_s = 2 * link.seconds(0, 3)  # the first runs are asked for before anything has arrived
    assert ours.end_s <= 1.05 * best.end_s + unmeasured_s
