"""Records when each request was in which stage, and hands the spans to an exporter of traces, which never waits.

Off by default. Each rank and its data plane export their own spans if ``OTEL_TRACES_EXPORTER`` is ``otlp``: see
``tracing.py``. Times are from ``time.monotonic()``, which all processes of a Linux machine share.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.keys import label_of_request

if TYPE_CHECKING:
    from sgl_kvfetch.tracing import Traces

logger = logging.getLogger(__name__)

TRACES_ENV = "OTEL_TRACES_EXPORTER"

Stage = Literal["parked", "lookup", "transmit", "decode", "restore"]


@dataclass(slots=True, eq=False)
class Request:
    """A request to which spans belong.

    ``traceparent`` names the span of its fetch, in the form of W3C Trace Context; it is empty if the request is not
    traced. ``parent_id`` names SGLang's span, the parent of that one. ``parts`` collects spans for `Traces`. ``id`` is
    cut (`label_of_request`): it goes to the data plane and to collectors.
    """

    id: str
    traceparent: str = ""
    parent_id: int = 0
    parts: list[Recorded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = label_of_request(self.id)

    def belongs_to(self, span: Any) -> None:
        """Make the fetch a child of ``span``, an OpenTelemetry ``SpanContext``. Trace it only if that is sampled."""
        if span.is_valid:
            self.parent_id = span.span_id
            sampled = f"00-{span.trace_id:032x}-{self.traceparent[36:52]}-01"
            self.traceparent = sampled if span.trace_flags.sampled else ""


NOBODY = Request("")  # its spans are not recorded


@dataclass(slots=True)
class Recorded:
    """A span. If ``stage`` is None, it is no span, but marks the end of a fetch."""

    request: Request
    stage: Stage | None
    start_s: float
    end_s: float
    attributes: Mapping[str, int | str] = field(default_factory=dict)


_process: Traces | None = None


def check_tracing(environ: Mapping[str, str] = os.environ) -> ModuleType | None:
    """Return the module that exports traces, or None if the environment does not ask for traces.

    Raises ConfigError if it asks for traces that cannot be exported.
    """
    asked = environ.get(TRACES_ENV, "")
    if "otlp" not in asked.split(",") or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            if protocol != "http/protobuf":
                raise ConfigError(f"{name} = {protocol!r}: kvfetch exports traces only as http/protobuf")
            break
    try:
        from sgl_kvfetch import tracing
    except ImportError as e:
        raise ConfigError(
            f"{TRACES_ENV} = {asked!r} needs a package that is missing ({e}): pip install '.[tracing]' in a checkout"
        ) from e
    return tracing


def start(rank: int | str, environ: Mapping[str, str] = os.environ) -> None:
    """Trace this process, if the environment asks for traces. Further calls do nothing.

    Raises ConfigError as `check_tracing` does.
    """
    global _process
    if _process is None and (tracing := check_tracing(environ)) is not None:
        _process = tracing.Traces(str(rank))
        atexit.register(_process.close)
        logger.info("traces of rank %s are exported", rank)


def close() -> None:
    """Export the queued spans of this process, if it is traced. Waits for a collector, but not for long."""
    if _process is not None:
        _process.close()


def is_traced() -> bool:
    return _process is not None


def arrived(request_id: str) -> Request:
    """Return a request that has arrived. If traces are exported, it gets a span for its fetch."""
    request = Request(request_id)
    if is_traced():
        # All ranks have the same trace, unless SGLang traces the request: then its trace replaces this one.
        # Not from ``random``: SGLang gives all ranks the same seed.
        request.traceparent = f"00-{xxhash.xxh3_128_hexdigest(request.id.encode())}-{os.urandom(8).hex()}-01"
    return request


def add(request: Request, stage: Stage, start_s: float, end_s: float, **attributes: int | str) -> None:
    """Record a span of this process. Does nothing without traces, or for `NOBODY`. Thread-safe.

    Traces join the spans of a stage: they add up numbers of ``attributes``, and list words.
    """
    if _process is not None and request.id:
        _process.add(Recorded(request, stage, start_s, end_s, attributes))


def fetched(request: Request) -> None:
    """Record that the data plane has fetched what it can for a request: its stages are over."""
    if _process is not None and request.traceparent:
        _process.add(Recorded(request, None, 0.0, 0.0))
