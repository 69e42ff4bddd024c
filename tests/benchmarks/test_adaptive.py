"""``python -m benchmarks.adaptive``: small runs of it, and the claims that need no large one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adaptive import told
from benchmarks.adaptive.__main__ import main
from benchmarks.adaptive.judge import judge, summarise
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.scenarios import grid, paper_scene, random_traces, read_traces
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.adapt.estimate import Transfer

PNG = b"\x89PNG"
PROFILES = list(PUBLISHED.values())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "bw.jsonl"
    path.write_text('{"bw": [6, 3.5, 4]}\n\n{"bw": [0.2, 9]}\n')
    return path


def run(out: Path, *args: object) -> dict[str, Any]:
    assert main([*map(str, args), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_json_has_a_row_a_line_and_device(trace: Path, tmp_path: Path) -> None:
    found = run(tmp_path / "out.json", "--trace", trace, "--only-trace", "--device", "L20", "--device", "H20")
    names = [s["name"] for s in found["scenarios"]]
    assert names == ["bw.jsonl:1, L20", "bw.jsonl:3, L20", "bw.jsonl:1, H20", "bw.jsonl:3, H20"]
    for s in found["scenarios"]:
        assert set(s["fixed_s"]) == {"240p", "480p", "640p", "1080p"}
        assert s["oracle_bound_s"] <= s["oracle_s"] * (1 + 1e-9)
        assert s["oracle_s"] <= min(*s["fixed_s"].values(), s["algorithm1_s"], s["ours_s"]) * (1 + 1e-9)
    assert found["scenarios"][0]["chunks"] == 3
    # 180 MB a chunk at 0.2 and 9 Gbps; the first is still decoded then, and the second session is new.
    assert found["scenarios"][1]["fixed_s"]["240p"] == pytest.approx(7.2 + 0.16 + 0.06 + 0.18)
    assert found["simulated"] is True


def test_a_whole_run_with_plots(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.adaptive.scenarios.HEAT_GBPS", (5.0, 40.0))
    monkeypatch.setattr("benchmarks.adaptive.scenarios.HEAT_TOKENS", (20_000,))
    plots = tmp_path / "plots"
    args = ("--trace", trace, "--random", 3, "--device", "A100", "--plots", plots)
    found = run(tmp_path / "out.json", *args)
    assert [g["name"] for g in found["groups"]] == ["trace", "paper", "random", "several", "2x", "0.5x", "grid A100"]
    assert sum(g["scenarios"] for g in found["groups"]) == len(found["scenarios"])
    for name in ("adaptive_speedup.png", "adaptive_timeline.png"):
        assert (plots / name).read_bytes().startswith(PNG)
    again = run(tmp_path / "again.json", *args[:-2])
    assert again["scenarios"] == found["scenarios"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one trace"),
        ("nonsense\n", "bw.jsonl:1: .*malformed"),
        ('{"bw": []}\n', "length >= 1"),
        ('{"bw": [1]}\n{"bw": [1, 0]}\n', r"bw.jsonl:2: Expected `float` > 0.0 - at `\$.bw"),
    ],
)
def test_a_bad_trace_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bw.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_traces(path))
    with pytest.raises(SystemExit, match=message):
        main(["--trace", str(path), "--only-trace"])


def test_the_goals_on_the_papers_scene() -> None:
    summary = summarise([judge(s, max_nodes=100) for s in paper_scene(PUBLISHED["H20"], None).scenarios])
    assert 0.15 < summary["algorithm1_saves"] < 0.25
    assert summary["ours_to_oracle_max"] < 1.05
    assert summary["ours_to_best_fixed_max"] < 1.02
    assert summary["oracle_proven"] == 1


def test_the_goals_on_random_traces() -> None:
    """Other ones than the documentation's. That ours stays within 2% of the best fixed one is missed on some: the worst
    is only kept from growing."""
    summary = summarise([judge(s, max_nodes=0) for s in random_traces(PROFILES, 60, 11, None).scenarios])
    assert summary["ours_to_oracle"] < 1.05
    assert summary["ours_to_oracle"] < summary["algorithm1_to_oracle"] - 0.05
    assert summary["ours_saves"] > summary["algorithm1_saves"]
    assert summary["over_2_percent"] < 0.2 * summary["scenarios"]


def test_ours_gains_where_decoders_and_link_are_a_match() -> None:
    judged = [judge(s, max_nodes=0) for s in grid(PUBLISHED["H20"], None).scenarios if "20 Gbps" in s.name]
    assert all(j.ours.end_s < j.algorithm1.end_s for j in judged)
    assert any(j.ours.end_s < 0.98 * j.best_fixed_s for j in judged)


def test_the_policy_that_is_told_knows_the_law_and_not_the_future() -> None:
    seen = [Transfer(1_000_000_000, 0.0, 2.0)]  # 4 Gbps
    walk = told.Law("walk", 8.0, seen).paths(200)
    assert all(path[0] == pytest.approx(4e9, rel=1) for path in walk)  # goes on from there
    assert statistics.median(path[-1] for path in walk) == pytest.approx(8e9, rel=0.5)
    jumps = told.Law("jumps", 8.0, seen).paths(10)
    assert any(path[0] == 4e9 for path in jumps)  # the run may go on
    assert any(path[0] != 4e9 for path in jumps)  # or be over
    independent = told.Law("independent", 8.0, seen).paths(100)
    assert statistics.median(bps for path in independent for bps in path) == pytest.approx(8e9, rel=0.2)


def test_ours_and_told_are_judged_on_the_same_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert told.main(["--random", "4", "--seed", "3"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    counts = [int(row.split("│")[2]) for row in rows]
    assert sum(counts[:-1]) == counts[-1] == 4
