"""Merges the server's timeline with the client's view of the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_kvfetch.timeline import Span


@dataclass(frozen=True)
class Request:
    """A request as the client sees it. Times are those of ``time.monotonic()``. ``storage_tokens``: prompt tokens that
    came from the store."""

    name: str
    sent_s: float
    first_s: float
    end_s: float
    tpot_s: float
    storage_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


def merged(requests: Iterable[Request], spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Return each request's spans by its name, sorted by start. Before the first token, times without a span of the
    server count as queued; after it, the request generates."""
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        by_name.setdefault(span.request, []).append(span)
    result = {}
    for request in requests:
        own = sorted(by_name.get(request.name, []), key=lambda span: (span.start_s, span.end_s))
        queued = [Span(request.name, "queued", *gap) for gap in _gaps(own, request.sent_s, request.first_s)]
        after = [Span(request.name, "generate", request.first_s, request.end_s)]
        result[request.name] = sorted([*queued, *own, *after], key=lambda span: span.start_s)
    return result


def fetch_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Return for each request the seconds from requesting the first byte to restoring the last page."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for span in spans:
        if span.stage in ("transmit", "decode", "restore"):
            first[span.request] = min(first.get(span.request, span.start_s), span.start_s)
            last[span.request] = max(last.get(span.request, span.end_s), span.end_s)
    return {name: last[name] - start_s for name, start_s in first.items()}


def _gaps(spans: Sequence[Span], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return the gaps that sorted spans leave between two times."""
    gaps = []
    for span in spans:
        if span.start_s >= end_s:
            break
        if span.start_s > start_s:
            gaps.append((start_s, span.start_s))
        start_s = max(start_s, span.end_s)
    if start_s < end_s:
        gaps.append((start_s, end_s))
    return gaps
