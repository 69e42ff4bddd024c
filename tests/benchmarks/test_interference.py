from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.interference.__main__ import parse
from benchmarks.interference.load import Run, make_plan
from benchmarks.interference.plot import plot_timeline
from benchmarks.interference.report import confidence_interval, make_rows, make_table
from benchmarks.interference.spans import Request, fetch_seconds, merged
from sgl_kvfetch.timeline import Span, read_spans

LAUNCH = ["--launch"]


def request(name: str, sent_s: float, ttft_s: float, tpot_s: float = 0.01, storage_tokens: int = 0) -> Request:
    return Request(name, sent_s, sent_s + ttft_s, sent_s + ttft_s + 15 * tpot_s, tpot_s, storage_tokens)


def run(ttfts_s: list[float], tpot_s: float, num_long: int = 0) -> Run:
    """A short request a second; the first long one is there at once, and waits for 1.5 s."""
    long = [request(f"long-{i}", i * 10.0, 1.5, storage_tokens=1520) for i in range(num_long)]
    spans = [Span(r.name, "transmit", r.sent_s + 0.1, r.sent_s + 1.3) for r in long]
    return Run([request(f"short-{i}", float(i), s, tpot_s) for i, s in enumerate(ttfts_s)], long, spans)


def test_ratios_are_medians_of_paired_rounds() -> None:
    """The machine was twice as slow in the second round, for both modes: that is no interference."""
    rows = make_rows(
        {
            "none": [run([0.1, 0.1, 0.4], 0.01), run([0.2, 0.2, 0.8], 0.02), run([0.1] * 3, 0.01)],
            "device": [run([0.11] * 3, 0.01, 1), run([0.22] * 3, 0.02, 1), run([0.3] * 3, 0.04, 1)],
        }
    )
    none, device = rows
    assert none["ratio_ttft_p50"] == 1.0
    assert device["ratios_ttft_p50"] == pytest.approx([1.1, 1.1, 3.0])
    assert device["ratio_ttft_p50"] == pytest.approx(1.1)
    assert device["ratio_tpot_p50"] == pytest.approx(1.0)
    assert (device["rounds"], device["num_short"]) == (3, 9)
    assert device["long_storage_tokens"] == [1520] * 3
    assert device["fetch_s"] == pytest.approx(1.2)
    assert device["share_during_fetch"] == pytest.approx(2 / 3)
    assert none["long_ttft_s"] is None
    assert none["fetch_s"] is None
    assert make_table(rows, True).row_count == 2


def test_requests_during_a_fetch_are_compared_with_the_others_of_their_server() -> None:
    long = [request("long", 0.0, 5.5)]
    short = [request(f"short-{i}", float(i), 0.3 if i < 6 else 0.2, 0.01) for i in range(12)]
    few = [request("long", 0.0, 0.5)]  # one short request in it
    rows = make_rows(
        {"none": [Run(short, [], []), Run(short, [], [])], "device": [Run(short, long, []), Run(short, few, [])]}
    )
    assert rows[0]["within_ratios_ttft_p50"] == []
    assert rows[1]["within_ratios_ttft_p50"] == pytest.approx([1.5])
    assert rows[1]["within_ratios_tpot_p50"] == pytest.approx([1.0])


def test_intervals_are_paired_and_narrow_with_the_noise() -> None:
    """Each mode's times differ tenfold from round to round and from prompt to prompt; the modes differ by a tenth."""
    rng = np.random.default_rng(1)
    base = rng.uniform(0.1, 1.0, size=(8, 1)) * np.linspace(0.95, 1.05, 41)
    low, high = confidence_interval(1.1 * base, base)
    assert low == pytest.approx(1.1)
    assert high == pytest.approx(1.1)
    quiet = confidence_interval(1.1 * base * rng.normal(1, 0.02, base.shape), base)
    noisy = confidence_interval(1.1 * base * rng.normal(1, 0.2, base.shape), base)
    assert quiet[0] < 1.1 < quiet[1]
    assert quiet[1] - quiet[0] < noisy[1] - noisy[0]


def test_every_mode_sends_the_same_at_the_same_times() -> None:
    options = parse([*LAUNCH, "--duration", "10", "--short-rate", "3"])
    plan = make_plan(options)
    assert make_plan(options) == plan
    assert 15 < len(plan.short) < 50
    assert all(0 < prompt.start_s < 10 for prompt in plan.short)
    both = [*plan.short, *plan.long]
    assert len({tuple(prompt.tokens) for prompt in both}) == len({prompt.name for prompt in both}) == len(both)


def test_a_request_is_queued_while_nothing_else_is_said() -> None:
    asked = request("long-0", 10.0, 2.0, tpot_s=0.1)
    server = [
        Span("long-0", "parked", 10.25, 11.5),
        Span("long-0", "transmit", 10.5, 11.0),
        Span("long-0", "restore", 11.0, 11.25),
        Span("long-0", "prefill", 11.75, 11.875),
        Span("other", "prefill", 10.0, 10.25),
    ]
    spans = merged([asked], server)["long-0"]
    assert [(s.start_s, s.end_s) for s in spans if s.stage == "queued"] == [(10, 10.25), (11.5, 11.75), (11.875, 12)]
    assert [(s.start_s, s.end_s) for s in spans if s.stage == "generate"] == [(12.0, 13.5)]
    assert [s.stage for s in spans if s.stage not in ("queued", "generate")] == [s.stage for s in server[:4]]
    assert [s.stage for s in merged([asked], [])["long-0"]] == ["queued", "generate"]
    assert fetch_seconds(server) == {"long-0": 0.75}


def test_a_servers_timeline_is_read_up_to_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "timeline.0"
    line = '{"request": "long-0", "stage": "parked", "start_s": 1.5, "end_s": 2.5}\n'
    path.write_text(line * 2 + line[:30])
    assert read_spans(path) == [Span("long-0", "parked", 1.5, 2.5)] * 2
    path.write_text("")
    assert read_spans(path) == []


def test_a_picture_of_many_requests(tmp_path: Path) -> None:
    requests = sorted(
        [request(f"short-{i}", i / 2, 0.1) for i in range(40)] + [request(f"long-{i}", 5.0 * i, 4.0) for i in range(4)],
        key=lambda r: r.sent_s,
    )
    server = [Span(f"long-{i}", "parked", 5.0 * i + 0.1, 5.0 * i + 3.8) for i in range(4)]
    path = tmp_path / "timeline.png"
    plot_timeline(path, merged(requests, server), {f"long-{i}" for i in range(4)}, "test")
    assert path.read_bytes().startswith(b"\x89PNG")
