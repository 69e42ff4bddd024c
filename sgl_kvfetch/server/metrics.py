"""The server's metrics, in a separate registry."""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from sgl_kvfetch import __version__
from sgl_kvfetch.directory import StoreUsage
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores.wire import Route

_limited = LimitedLogger(logging.getLogger(__name__))
_MOST_FAILURES = 50
_MOST_CLIENTS = 64
_MOST_FOLDERS = 1000
_OBJECT = Route.OBJECTS + "/{name}"
_WORK = {("POST", Route.LOOKUP): "lookup", ("GET", _OBJECT): "read", ("PUT", _OBJECT): "write"}
_OBSERVERS = frozenset({Route.SUMMARY, Route.METRICS, Route.HEALTH})  # what asks for metrics is not in them
OTHER_ROUTE = "other"  # unknown paths and methods must not become labels
_LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Failure(msgspec.Struct, frozen=True):
    """A request that failed, for the page. ``client`` is an address; it is empty if it is not known."""

    at_s: float
    client: str
    what: str
    cause: str
    message: str


class Client(msgspec.Struct):
    """What an address has asked for since the store's start, and when last."""

    address: str
    lookups: int = 0
    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    last_s: float = 0.0


class AnswerTimes(msgspec.Struct, frozen=True):
    """The times, in seconds, within which half of all answers of a kind came, and 95%. They are bounds of buckets;
    infinite behind the last one."""

    half_s: float
    most_s: float


class ServerMetrics:
    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Register all metrics of a server, in a registry of its own."""
        self.registry = CollectorRegistry()
        self.last_failures: deque[Failure] = deque(maxlen=_MOST_FAILURES)
        self._clients: OrderedDict[str, Client] = OrderedDict()  # the one that asked last is the last
        self.found_pages: dict[str, int] = {}  # by folder; the one where something was found last is the last
        self.started_s = time.time()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace="kvfetch", subsystem="server", registry=self.registry)
        gauge = partial(Gauge, namespace="kvfetch", subsystem="server", registry=self.registry)
        labels = ("method", "route")
        self.requests = counter("requests", "Requests answered", (*labels, "status"))
        self.seconds = Histogram(
            "request_seconds",
            "Time to answer, including the body",
            labels,
            namespace="kvfetch",
            subsystem="server",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.failures = counter("failures", "Answers with a status of 500 or more, and answers cut short", ("cause",))
        self._in_flight = gauge("requests_in_flight", "Requests being answered, but for the web UI and metrics")
        self.received_bytes = counter("received_bytes", "Bytes of request bodies")
        self.sent_bytes = counter("sent_bytes", "Bytes of response bodies")
        self.lookup_pages = counter("lookup_pages", "Pages looked up, by result", ("result",))
        for result in ("hit", "miss"):  # there from the start on: `rate` does not see what a sample begins with
            self.lookup_pages.labels(result)
        self._stored_bytes = gauge("stored_bytes", "Bytes of all objects")
        self._read_only = gauge("read_only", "1 while nothing can be written")
        self._disk_bytes = gauge("disk_bytes", "Size of the file system with the store")
        self._disk_free_bytes = gauge("disk_free_bytes", "Free bytes of that file system")
        gauge("build_info", "1", ("version",)).labels(__version__).set(1)
        capacity = gauge("capacity_bytes", "Most bytes to store; +Inf without a limit")
        capacity.set(float("inf") if capacity_bytes is None else capacity_bytes)
        self._segments = gauge("segments", "Segments that lookups can find")
        self._evicted = counter("evicted_segments", "Segments evicted to make room")
        self._num_evicted = 0
        self._upstream_bytes = counter(
            "upstream_bytes", "Bytes of data read from the upstream: for readers, or to keep segments", ("for",)
        )
        self._upstream_failures = counter(
            "upstream_failures", "Failures of the upstream, and of what keeps its segments", ("operation",)
        )
        for purpose in ("readers", "keeping"):
            self._upstream_bytes.labels(purpose)
        for operation in ("lookup", "read", "write", "delete", "keep"):
            self._upstream_failures.labels(operation)
        self._last_upstream = {"readers": 0, "keeping": 0}
        self._certificates = gauge(
            "certificate_end_timestamp_seconds", "When certificates end: our own, and the last of the CAs", ("file",)
        )

    def activity(self) -> dict[str, float]:
        """Return what has happened since the start, and what is stored, by name. Labels' values follow a name."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for name, labels, value, *_ in family.samples:
                if not name.startswith("kvfetch_server_") or name.endswith(("_created", "_bucket")):
                    continue
                if family.name.endswith("request_seconds") and (labels["method"], labels["route"]) not in _WORK:
                    continue
                if family.name.endswith("requests") and labels["status"] < "400":
                    continue
                work = _WORK.get((labels.get("method", ""), labels.get("route", "")), "")
                label = labels.get("result") or labels.get("status") or labels.get("cause") or work
                key = name.removeprefix("kvfetch_server_") + (f":{label}" if label else "")
                found[key] = found.get(key, 0.0) + value
        return found

    def answers_by_time(self) -> dict[str, list[float]]:
        """Return how many answers came within each bucket's bound since the start, by kind of work."""
        found: dict[str, list[float]] = {}
        for family in self.seconds.collect():
            for name, labels, value, *_ in family.samples:
                work = _WORK.get((labels["method"], labels["route"]))
                if name.endswith("_bucket") and work is not None:
                    found.setdefault(work, []).append(value)
        return found

    def answer_times(self, before: Mapping[str, Sequence[float]]) -> dict[str, AnswerTimes]:
        """Return how long answers took since `answers_by_time` returned ``before``; only kinds that there were."""
        found = {}
        for work, now in self.answers_by_time().items():
            since = [count - old for count, old in zip(now, before.get(work, [0] * len(now)), strict=True)]
            bounds = (*_LATENCY_BUCKETS_S, inf)
            if since[-1]:
                half, most = (
                    next(bound for bound, count in zip(bounds, since, strict=True) if count >= share * since[-1])
                    for share in (0.5, 0.95)
                )
                found[work] = AnswerTimes(half, most)
        return found

    @contextlib.contextmanager
    def in_flight(self, route: str) -> Iterator[None]:
        """Count a request as being answered meanwhile."""
        if route in _OBSERVERS:
            yield
            return
        with self._in_flight.track_inprogress():
            yield

    def answered(self, request: web.Request, route: str, status: str, seconds: float, num_sent: int) -> None:
        """Record a request that was answered, or given up. ``num_sent``: bytes of the answer's body."""
        method = request.method if route != OTHER_ROUTE else OTHER_ROUTE
        self.requests.labels(method, route, status).inc()
        self.seconds.labels(method, route).observe(seconds)
        work = _WORK.get((method, route))
        if work is None or status >= "400":
            return
        address = request.remote or ""
        client = self._clients.setdefault(address, Client(address))
        self._clients.move_to_end(address)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        client.last_s = time.time()
        match work:
            case "lookup":
                client.lookups += 1
            case "read":
                client.reads += 1
                client.read_bytes += num_sent
            case _:
                client.writes += 1
                client.written_bytes += request.content_length or 0

    @property
    def clients(self) -> list[Client]:
        """Those that have looked up, read or written, the last one first; a limited number."""
        return list(reversed(self._clients.values()))

    def count_failure(self, what: str, cause: str, message: str, client: str | None = None) -> None:
        """Count a failure by its cause, and keep it for the page."""
        self.failures.labels(cause).inc()
        self.last_failures.append(Failure(time.time(), client or "", what[:200], cause, message[:500]))

    def record_failure(self, what: str, cause: str, message: str, client: str | None = None) -> None:
        """Count a failure, and log it: the first of a kind at once, others once a minute, counted."""
        self.count_failure(what, cause, message, client)
        _limited.warning(f"{what.partition(' ')[0]} {cause}", f"{what[:200]} failed ({cause}): {message}")

    def record_lookup(self, folder: str, pages_asked: int, pages_found: int) -> None:
        self.lookup_pages.labels("hit").inc(pages_found)
        self.lookup_pages.labels("miss").inc(pages_asked - pages_found)
        if pages_found:
            self.found_pages[folder] = self.found_pages.pop(folder, 0) + pages_found
            if len(self.found_pages) > _MOST_FOLDERS:
                del self.found_pages[next(iter(self.found_pages))]

    def record_certificates(self, ends: Mapping[str, float]) -> None:
        """``ends``: as `tls.ends_of` returns it."""
        for file, end_s in ends.items():
            self._certificates.labels(file).set(end_s)

    def record_usage(self, usage: StoreUsage) -> None:
        self._stored_bytes.set(usage.stored_bytes)
        self._segments.set(usage.num_segments)
        self._read_only.set(usage.write_problem is not None)
        self._disk_bytes.set(usage.disk_bytes)
        self._disk_free_bytes.set(usage.disk_free_bytes)
        self._evicted.inc(usage.num_evicted - self._num_evicted)
        self._num_evicted = usage.num_evicted

    def record_upstream(self, passed_bytes: int, kept_bytes: int) -> None:
        """Take the counts of a store that has an upstream."""
        now = {"readers": passed_bytes, "keeping": kept_bytes}
        for purpose, num_bytes in now.items():
            self._upstream_bytes.labels(purpose).inc(num_bytes - self._last_upstream[purpose])
        self._last_upstream = now

    def record_upstream_failure(self, operation: str, error: StoreError) -> None:
        self._upstream_failures.labels(operation).inc()
        _limited.warning(f"upstream {operation} {error.reason}", f"upstream ({operation}, {error.reason}): {error}")


def cause_of(error: Exception) -> str:
    """Return why a request failed, as a word: a StoreError's reason, with the code of the system or of SQLite."""
    if not isinstance(error, StoreError):
        return f"bug:{type(error).__name__}"
    match error.__cause__:
        case OSError(errno=int(number)):
            return f"{error.reason}:{errno.errorcode.get(number, number)}"
        case sqlite3.Error(sqlite_errorname=name):
            return f"{error.reason}:{name}"
    return error.reason
