from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import wait_until
from sgl_kvfetch import timeline
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.timeline import TIMELINE_ENV, Output, Recorded, Request, SpanFile, Timeline


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Timeline]]:
    """The timelines of this process, which has none at first."""
    started: list[Timeline] = []

    def start(*outputs: Output) -> Timeline:
        started.append(Timeline(*outputs))
        return started[-1]

    monkeypatch.setattr(timeline, "_process", None)
    monkeypatch.setattr(timeline, "Timeline", start)
    yield started
    for each in started:
        each.close()


def test_spans_of_all_threads_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    recorder = Timeline(SpanFile(path))

    def add(name: str) -> None:
        for i in range(500):
            recorder.add(Recorded(Request(name), "transmit", i, i + 0.5))

    threads = [threading.Thread(target=add, args=(f"request {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    spans = read(path)
    for n in range(4):
        own = [span for span in spans if span["request"] == f"request {n}"]
        assert [span["start_s"] for span in own] == list(range(500))
        assert own[7] == {"request": f"request {n}", "stage": "transmit", "start_s": 7, "end_s": 7.5}
    assert len(spans) == 2000


def test_a_process_that_is_killed_loses_little(tmp_path: Path) -> None:
    recorder = Timeline(SpanFile(tmp_path / "spans"))
    recorder.add(Recorded(Request("a"), "parked", 1.0, 2.0))
    wait_until(lambda: bool((tmp_path / "spans").read_text()))
    assert len(read(tmp_path / "spans")) == 1
    recorder.close()


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "FLUSH_S", 60.0)
    monkeypatch.setattr(timeline, "MAX_WAITING", 3)
    recorder = Timeline(SpanFile(tmp_path / "spans"))
    for start_s in range(5):
        recorder.add(Recorded(Request("a"), "decode", start_s, 9.0))
    recorder.close()
    recorder.close()
    assert [span["start_s"] for span in read(tmp_path / "spans")] == [2, 3, 4]


def test_a_process_records_into_its_ranks_file_if_the_environment_says_so(
    tmp_path: Path, started: list[Timeline]
) -> None:
    timeline.start(1, {})
    assert not timeline.is_on()
    timeline.add(Request("a"), "parked", 1.0, 2.0)
    environ = {TIMELINE_ENV: str(tmp_path / "spans")}
    timeline.start(1, environ)
    timeline.start(1, environ)
    assert timeline.is_on()
    timeline.add(Request("b"), "parked", 1.0, 2.0, tokens=64)
    timeline.add(timeline.NOBODY, "parked", 1.0, 2.0)
    timeline.fetched(Request("b"))
    assert timeline.arrived("b").traceparent == ""
    (only,) = started
    only.close()
    assert [file.name for file in tmp_path.iterdir()] == ["spans.1"]
    assert [span["request"] for span in read(tmp_path / "spans.1")] == ["b"]


@pytest.mark.usefixtures("started")
def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KVFETCH_TIMELINE = '.*no/such': cannot write .*no/such\.0"):
        timeline.start(0, {TIMELINE_ENV: str(tmp_path / "no" / "such")})
    assert not timeline.is_on()
