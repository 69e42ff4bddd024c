"""Exports fetches to an OpenTelemetry collector, by OTLP over HTTP. Needs the packages of the extra ``tracing``.

A fetch is one span, from the request's arrival until its prefix is in the pool or given up, with a child for each
stage: lookup, transmit, decode, restore. A stage has many reads or cells; its span lasts from the start of the first
one to the end of the last one. The engine's process and its data plane each export the spans that they have seen.
OpenTelemetry's own environment variables say where to, and how often.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from sgl_kvfetch import __version__
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.timeline import Recorded, Request

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
_CLOSE_S = 2.0  # how long closing may wait for a collector


def _log_seldom(record: logging.LogRecord) -> bool:
    """A filter that logs the record itself, once a minute: the SDK warns of each attempt and of dropped spans."""
    _limited.warning("traces", f"traces: {record.getMessage()}")
    return False


class Traces:
    """Hands spans to the SDK, whose queue has no lock and a thread of its own. The queue is bounded: spans are dropped
    while no collector takes them. Thread-safe."""

    def __init__(self, rank: str) -> None:
        for name in (OTLPSpanExporter.__module__, "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).addFilter(_log_seldom)
        self._rank = rank
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        # The name that SGLang's own spans have by default.
        self._resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "sglang")})
        self._scope = InstrumentationScope("sgl_kvfetch", __version__)
        self._to_wall_s = time.time() - time.monotonic()

    def add(self, span: Recorded) -> None:
        """Export a span; of a stage with many parts, keep it until the fetch ends."""
        request, stage = span.request, span.stage
        if not request.traceparent:
            return
        if stage in ("transmit", "decode", "restore"):
            request.parts.append(span)
        elif stage in ("parked", "lookup"):
            name = "kvfetch.fetch" if stage == "parked" else "kvfetch.lookup"
            self._export(request, name, span.start_s, span.end_s, span.attributes)
        elif stage is None:
            self._export_parts(request)

    def _export_parts(self, request: Request) -> None:
        """Export one span for each stage that has many parts, from the first one's start to the last one's end."""
        all_parts, request.parts = request.parts, []  # threads of a cancelled fetch may add more
        for stage in dict.fromkeys(part.stage for part in all_parts):
            parts = [part for part in all_parts if part.stage == stage]
            about: dict[str, int | float | str] = {
                "parts": len(parts),
                "busy_s": round(sum(part.end_s - part.start_s for part in parts), 6),
            }
            for key, first in parts[0].attributes.items():
                values = [part.attributes[key] for part in parts]
                is_text = isinstance(first, str)
                about[key] = ",".join(dict.fromkeys(map(str, values))) if is_text else sum(map(int, values))
            start_s, end_s = min(part.start_s for part in parts), max(part.end_s for part in parts)
            self._export(request, f"kvfetch.{stage}", start_s, end_s, about)

    def close(self) -> None:
        """Export what is queued. Wait for that, but not for a collector that hangs. Idempotent."""
        closing = threading.Thread(target=self._processor.shutdown, name="kvfetch-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _export(
        self, request: Request, name: str, start_s: float, end_s: float, attributes: Mapping[str, int | float | str]
    ) -> None:
        """Hand a span to the SDK. A fetch has the id that its request carries; other spans are its children."""
        trace_id, fetch_id = int(request.traceparent[3:35], 16), int(request.traceparent[36:52], 16)
        is_fetch = name == "kvfetch.fetch"
        span_id, parent_id = (
            (fetch_id, request.parent_id) if is_fetch else (int.from_bytes(os.urandom(8), "big"), fetch_id)
        )
        about: dict[str, int | float | str] = {"rid": request.id, "kvfetch.process": self._rank}
        about |= {f"kvfetch.{key}": value for key, value in attributes.items() if value != ""}
        self._processor.on_end(
            ReadableSpan(
                name,
                _context(trace_id, span_id),
                _context(trace_id, parent_id) if parent_id else None,
                self._resource,
                about,
                start_time=round((start_s + self._to_wall_s) * 1e9),
                end_time=round((end_s + self._to_wall_s) * 1e9),
                instrumentation_scope=self._scope,
            )
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
