"""A collector of traces: takes OTLP over HTTP, as protobuf, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    """A span. ``parent_id`` is empty for the first one of a trace. Times are Unix times."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


class OtlpReceiver:
    """A context manager that receives spans on a free loopback port. ``asked`` is set when a request comes. Exporters
    wait while ``answers`` is cleared."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                for span in scope.spans:
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    self.spans.append(ReceivedSpan(span.name, *ids, *times, _values(span.attributes), resource))


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, receiver: OtlpReceiver, *args: Any) -> None:
        self._receiver = receiver
        super().__init__(*args)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._receiver.asked.set()
        self._receiver.answers.wait()
        is_known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        if is_known:
            self._receiver.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
