from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.client import Answer, CachedTokens
from benchmarks.conversations import Conversation, Turn
from benchmarks.dataset import Dataset
from benchmarks.load import LoadResult, Record
from benchmarks.measure import Run, Workload, make_run
from benchmarks.options import parse_options
from benchmarks.plot import plot_ttft
from benchmarks.report import print_table, to_json, write_json
from benchmarks.stats import Distribution, Traffic, distribution, same_answers, summarise
from benchmarks.tokens import HashedWords


def _answer(ttft_s: float, itl_s: list[float], cached: CachedTokens) -> Answer:
    ids = list(range(1 + len(itl_s)))
    return Answer(ids, ttft_s, ttft_s + sum(itl_s), itl_s, prompt_tokens=100, cached=cached)


RESULT = LoadResult(
    [
        Record(0, 0, 0.0, _answer(0.1, [0.01, 0.03], CachedTokens(16, 0, 0))),
        Record(0, 1, 0.2, _answer(0.3, [0.02, 0.04], CachedTokens(32, 16, 48))),
        Record(1, 0, 0.0, _answer(0.2, [], CachedTokens())),
        Record(1, 1, 0.3, error="status 500: no"),
    ],
    duration_s=2.0,
    prompts_digest="0",
)


def test_percentiles_of_known_numbers() -> None:
    known = distribution([float(i) for i in range(101)])
    assert known == Distribution(mean=50.0, p50=50.0, p95=95.0, p99=99.0)
    assert distribution([1.0, 2.0]) == Distribution(1.5, 1.5, pytest.approx(1.95), pytest.approx(1.99))
    assert distribution([]) == Distribution(None, None, None, None)


def test_a_run_in_figures() -> None:
    stats = summarise(RESULT)
    assert (stats.requests, stats.failures, stats.errors) == (4, 1, {"status 500: no": 1})
    assert stats.ttft_s.mean == pytest.approx(0.2)
    assert stats.ttft_s.p50 == pytest.approx(0.2)
    assert stats.tpot_s.p50 == pytest.approx(0.025)  # of 0.02 and 0.03; one token has no time per later token
    assert stats.itl_s.mean == pytest.approx(0.025)
    assert stats.cached_tokens == CachedTokens(device=48, host=16, storage=48)
    assert (stats.prompt_tokens, stats.output_tokens) == (300, 7)
    assert stats.requests_per_s == pytest.approx(1.5)
    assert stats.output_tokens_per_s == pytest.approx(3.5)
    assert [(turn.turn, turn.requests, turn.ttft_s.p50) for turn in stats.by_turn] == [
        (1, 2, pytest.approx(0.15)),
        (2, 1, pytest.approx(0.3)),
    ]


def test_answers_are_compared_with_the_first_runs() -> None:
    other = LoadResult([Record(0, 0, 0.0, Answer([9])), *RESULT.records[1:]], 1.0, "0")
    assert same_answers(RESULT, RESULT) == 3
    assert same_answers(other, RESULT) == 2


def _workload(*args: str) -> Workload:
    options = parse_options(["--dataset", "some.txt", *args])
    workload = Workload(options, Dataset(Path("some.txt"), "text", texts=("a b",)))
    workload.tokens = HashedWords(10, {0})
    workload.conversations = [Conversation((Turn((1,)), Turn((2,))))] * 2
    return workload


def _runs() -> list[Run]:
    none = make_run("none", "nothing", RESULT, lambda tokens: Traffic(0, 0), None)
    fill = {"requests": 4, "duration_s": 1.0, "wire_bytes": 500, "raw_bytes": 1000}
    ours = make_run("kvfetch", "ours", RESULT, lambda tokens: Traffic(tokens, None), RESULT, other_cores=1.5, fill=fill)
    return [none, ours]


def test_json(tmp_path: Path) -> None:
    workload = _workload("--launch", "--kvfetch", "token=secret", "--api-key", "secret")
    write_json(tmp_path / "out.json", to_json(_runs(), workload, "how", 3.0))
    text = (tmp_path / "out.json").read_text()
    assert "secret" not in text
    content = json.loads(text)
    assert {"date", "machine", "versions", "config", "dataset", "method", "duration_s"} <= set(content)
    assert content["dataset"]["path"] == "some.txt"
    none, ours = content["runs"]
    for run in content["runs"]:
        assert isinstance(run["name"], str)
        assert isinstance(run["requests"], int)
        assert set(run["cached_tokens"]) == {"device", "host", "storage"}
        for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
            assert set(run[key]) == {"mean", "p50", "p95", "p99"}
            assert all(isinstance(value, float) for value in run[key].values())
        assert len(run["records"]) == 4
    assert (none["wire_bytes"], none["raw_bytes"]) == (0, 0)
    assert (ours["wire_bytes"], ours["raw_bytes"]) == (48, None)


def test_table_and_plot(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=(tmp_path / "sink").open("w"))
    print_table(_runs(), console)
    console.file.close()
    text = console.export_text()
    assert "cached, from storage" in text
    assert "1 x status 500: no" in text
    assert "kvfetch: other programs used 1.5 of" in text
    plot_ttft(tmp_path / "out.png", _runs(), "a test")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
