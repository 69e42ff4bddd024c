"""Fetches as traces, exported to a real receiver of OTLP."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

import sgl_kvfetch
from harness.otlp_receiver import OtlpReceiver
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch import log, timeline, tracing
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.timeline import Request, check_tracing

ON = {"OTEL_TRACES_EXPORTER": "otlp"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """This process exports traces to the receiver, one batch of at most 16 spans at a time."""
    settings = {
        "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        "OTEL_BSP_MAX_QUEUE_SIZE": "64",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
    }
    with OtlpReceiver() as receiver:
        for name, value in (ON | settings | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(timeline, "_process", None)
        timeline.start(3)
        yield receiver
        timeline.close()


def fetch(request: Request, now_s: float) -> None:
    """Record what the engine and its data plane record of a fetch."""
    there = Request(request.id, request.traceparent)  # as the data plane has it
    timeline.add(request, "lookup", now_s, now_s + 1, pages=40, found=30)
    timeline.add(there, "transmit", now_s + 1, now_s + 3, bytes=100)
    timeline.add(there, "transmit", now_s + 2, now_s + 5, bytes=50)
    timeline.add(there, "decode", now_s + 3, now_s + 4, bytes=100, codec="hevc")
    timeline.add(there, "decode", now_s + 5, now_s + 6, bytes=50, codec="zstd")
    timeline.add(there, "decode", now_s + 6, now_s + 7, bytes=1, codec="hevc")
    timeline.add(there, "restore", now_s + 4, now_s + 5)
    timeline.fetched(there)
    timeline.add(there, "restore", now_s + 8, now_s + 9)  # of a fetch that was cancelled
    timeline.add(request, "parked", now_s, now_s + 7, end="landed", tokens=480)


def test_a_fetch_is_a_span_with_a_child_for_each_stage(receiver: OtlpReceiver) -> None:
    now_s, wall_s = time.monotonic(), time.time()
    fetch(timeline.arrived("r1"), now_s)
    timeline.close()
    spans = {span.name: span for span in receiver.spans}
    whole = spans.pop("kvfetch.fetch")
    assert whole.parent_id == ""
    assert {(span.trace_id, span.parent_id) for span in spans.values()} == {(whole.trace_id, whole.span_id)}
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans) == 5
    assert whole.start_s == pytest.approx(wall_s, abs=60)
    times = {name: (span.start_s - whole.start_s, span.end_s - whole.start_s) for name, span in spans.items()}
    expected = {"lookup": (0, 1), "transmit": (1, 5), "decode": (3, 7), "restore": (4, 5)}
    assert times == {f"kvfetch.{stage}": pytest.approx(pair, abs=1e-3) for stage, pair in expected.items()}
    common = {"rid": "r1", "kvfetch.process": "3"}
    assert whole.attributes == common | {"kvfetch.end": "landed", "kvfetch.tokens": 480}
    assert spans["kvfetch.decode"].attributes == common | {
        "kvfetch.parts": 3,
        "kvfetch.busy_s": 3.0,
        "kvfetch.bytes": 151,
        "kvfetch.codec": "hevc,zstd",
    }
    assert whole.resource["service.name"] == "sglang"


def test_a_fetch_is_a_child_of_sglangs_span_and_else_ranks_share_a_trace(receiver: OtlpReceiver) -> None:
    sampled, unsampled = (SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(flag)) for flag in (1, 0))
    for name, span in (("r", sampled), ("unsampled", unsampled), ("own", INVALID_SPAN_CONTEXT)):
        request = timeline.arrived(name)
        request.belongs_to(span)
        fetch(request, time.monotonic())
    timeline.close()
    ours, own = receiver.named("kvfetch.fetch")
    assert (ours.attributes["rid"], ours.trace_id, ours.parent_id) == ("r", f"{0xABC:032x}", f"{0xDEF:016x}")
    assert (own.attributes["rid"], own.parent_id) == ("own", "")
    assert {span.attributes["rid"] for span in receiver.children(ours)} == {"r"}
    first, second, other = (timeline.arrived(name).traceparent for name in ("r", "r", "other"))
    assert first[:36] == second[:36] != other[:36]
    assert first != second


def test_a_collector_that_hangs_costs_bounded_memory_and_closing_does_not_wait_for_it(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK's warnings are logged once a minute, which does not pass."""
    monkeypatch.setattr(log, "_PERIOD_S", 1e9)
    monkeypatch.setattr(tracing, "_limited", LimitedLogger(tracing.logger))
    receiver.answers.clear()
    fetch(timeline.arrived("first"), time.monotonic())
    assert receiver.asked.wait(WAIT_S)
    for number in range(1000):
        fetch(timeline.arrived(f"r{number}"), time.monotonic())
    timeline.close()
    assert receiver.spans == []
    receiver.answers.set()
    wait_until(lambda: not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate()))
    assert 64 <= len(receiver.spans) <= 64 + 16
    assert [record.getMessage() for record in caplog.records] == ["traces: Queue full, dropping Span."]


def test_traces_are_off_unless_they_are_asked_for_and_go_by_one_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    off: tuple[dict[str, str], ...] = ({}, {"OTEL_TRACES_EXPORTER": "none"}, ON | {"OTEL_SDK_DISABLED": "true"})
    assert [check_tracing(environ) for environ in off] == [None] * 3
    assert check_tracing(ON | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) is not None
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL = 'grpc': .* only as http/protobuf"):
        check_tracing(ON | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "sgl_kvfetch.tracing", raising=False)
    monkeypatch.delattr(sgl_kvfetch, "tracing", raising=False)
    with pytest.raises(ConfigError, match=r"otlp' needs .*opentelemetry.*: pip install '\.\[tracing\]'"):
        check_tracing(ON)
