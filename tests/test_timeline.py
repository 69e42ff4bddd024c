from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from harness.waiting import wait_until
from sgl_kvfetch import timeline
from sgl_kvfetch.timeline import Recorded, Request, Timeline


class Kept:
    """An output that keeps all spans."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def write(self, spans: Sequence[Recorded]) -> None:
        self.spans += spans

    def close(self) -> None:
        pass


def test_spans_of_all_threads_are_written_whole() -> None:
    kept = Kept()
    recorder = Timeline(kept)

    def add(name: str) -> None:
        for i in range(500):
            recorder.add(Recorded(Request(name), "transmit", i, i + 0.5))

    threads = [threading.Thread(target=add, args=(f"request {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    for n in range(4):
        assert [span.start_s for span in kept.spans if span.request.id == f"request {n}"] == list(range(500))
    assert len(kept.spans) == 2000


def test_a_process_that_is_killed_loses_little() -> None:
    kept = Kept()
    recorder = Timeline(kept)
    recorder.add(Recorded(Request("a"), "parked", 1.0, 2.0))
    wait_until(lambda: len(kept.spans) == 1)
    recorder.close()


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "FLUSH_S", 60.0)
    monkeypatch.setattr(timeline, "MAX_WAITING", 3)
    kept = Kept()
    recorder = Timeline(kept)
    for start_s in range(5):
        recorder.add(Recorded(Request("a"), "decode", start_s, 9.0))
    recorder.close()
    recorder.close()
    assert [span.start_s for span in kept.spans] == [2, 3, 4]


def test_nothing_is_recorded_unless_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_process", None)
    timeline.start(1, {})
    assert not timeline.is_traced()
    timeline.add(Request("a"), "parked", 1.0, 2.0)
    timeline.fetched(Request("a"))
    assert timeline.arrived("b").traceparent == ""
    kept = Kept()
    monkeypatch.setattr(timeline, "_process", Timeline(kept))
    timeline.add(timeline.NOBODY, "parked", 1.0, 2.0)
    timeline.add(Request("b"), "parked", 1.0, 2.0, tokens=64)
    timeline.close()
    assert [span.request.id for span in kept.spans] == ["b"]
