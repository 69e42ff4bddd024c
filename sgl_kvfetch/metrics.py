"""Prometheus metrics. Import this only in processes that serve: prometheus_client decides at import whether it runs in
SGLang's multi-process mode, and SGLang sets that up after plugins are loaded.

`miss` also notes why a lookup, a fetch or a write fell short, for the request that is being served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from sgl_kvfetch.errors import KVFetchError, StoreErrorReason
from sgl_kvfetch.log import LimitedLogger, Troubles
from sgl_kvfetch.reasons import ADVICE, COUNTED, Reason, reason_of
from sgl_kvfetch.status import LENGTHS

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
_store = Troubles(logger, "the store")
# Reasons that concern the store, and not single segments; and those of them that any answer ends.
_OF_CONNECTION = frozenset({Reason.REFUSED, Reason.TLS, Reason.PROXY, Reason.CLOCK})
_CONNECTION = "connection"
_OF_STORE = _OF_CONNECTION | {Reason.TIMEOUT, Reason.UNAUTHORISED, Reason.SERVER, Reason.IO, Reason.FULL}

_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

LOOKUP_PAGES = Counter("sgl_kvfetch_lookup_pages", "Pages looked up", ["result"])  # hit, miss
MISSES = Counter(
    "sgl_kvfetch_misses", "Lookups, fetches, loads and writes that fell short because of an error", ["stage", "reason"]
)  # lookup, fetch, load, write; a `Reason`
FETCHED_PAGES = Counter("sgl_kvfetch_fetched_pages", "Pages requested from fetches", ["result"])  # hit, miss
READ_CELLS = Counter(
    "sgl_kvfetch_read_cells", "Cells restored, by how many times their step was tripled", ["coarseness"]
)
WIRE_BYTES = Counter("sgl_kvfetch_wire_bytes", "Bytes on the wire", ["direction"])  # read, lookup (manifests), write
RAW_BYTES = Counter("sgl_kvfetch_raw_bytes", "Size of the same pages in the pool", ["direction"])
CORRUPT_CHUNKS = Counter("sgl_kvfetch_corrupt_chunks", "Chunks that failed a checksum or did not decode")
RETRIES = Counter("sgl_kvfetch_retries", "Retried requests to the store")
INDEX_FAILURES = Counter("sgl_kvfetch_index_failures", "Calls of the page index that failed", ["reason"])
MEMORY_CACHE_READ_BYTES = Counter(
    "sgl_kvfetch_memory_cache_read_bytes", "Coded bytes read from memory_cache instead of the store"
)
DATA_PLANE_STARTS = Counter("sgl_kvfetch_data_plane_restarts", "Data planes replaced because they died or hung")
AUDITS = Counter(
    "sgl_kvfetch_audits", "Comparisons of stored pages with what the engine computes, by result", ["result"]
)
# sound, beyond (what is expected), failed (it could not be read)
AUDIT_TYPICAL = Histogram(
    "sgl_kvfetch_audit_typical",
    "Squared errors of audited pages, as a multiple of what is expected, of all layers, by their place in the prompt",
    ["tokens"],
    buckets=(0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 8, 16, 100),
)
AUDIT_DRIFT = Gauge(
    "sgl_kvfetch_audit_drift",
    "Median of sgl_kvfetch_audit_typical in the last 20 audits; 0 until there are as many",
    multiprocess_mode="livemax",
)
AUDITED_OFF = Gauge(
    "sgl_kvfetch_audited_off",
    "1 while nothing is read or written because audits have found that it would be wrong",
    multiprocess_mode="livemax",
)
SUSPENSIONS = Counter("sgl_kvfetch_suspensions", "Backends switched off because of weight updates")
STAGE_SECONDS = Histogram(
    "sgl_kvfetch_stage_seconds",
    "Duration of one unit of a stage: lookup, transmit, decode, restore, encode, commit",
    ["stage"],
    buckets=_STAGE_BUCKETS,
)
DIVERGED_PAGES = Counter(
    "sgl_kvfetch_diverged_pages",
    "Pages not found after a stored prefix, where the stored prompt continues with other tokens",
)
WRITTEN_PAGES = Counter("sgl_kvfetch_written_pages", "Pages submitted for writing", ["result"])
# stored, known (the store had them), dropped_full, dropped_invalid, dropped_error, dropped_data_plane (it ended),
# dropped_audited (audits have ended writing)
QUEUED_BYTES = Gauge(
    "sgl_kvfetch_queued_bytes",
    "Bytes in queues: write (raw), read (compressed)",
    ["queue"],
    multiprocess_mode="livesum",
)
STORE_DOWN = Gauge(
    "sgl_kvfetch_store_down",
    "1 while lookups are skipped, because the store failed",
    multiprocess_mode="livemax",
)
CERTIFICATE_END = Gauge(
    "sgl_kvfetch_certificate_end_timestamp_seconds",
    "When the certificates end that this server uses: its own, and the last of tls.ca_file",
    ["file"],
    multiprocess_mode="livemin",
)  # cert, ca

LEFT_TO_CPU = Gauge(
    "sgl_kvfetch_left_to_cpu",
    "1 while the CPU does what the GPU is meant to do, as a trial or loads have failed",
    ["work"],
    multiprocess_mode="livemax",
)  # decode (ans), restore, quantise

# Fetch or compute
DECISIONS = Counter("sgl_kvfetch_decisions", "Stored prefixes, by decision and its reason", ["decision", "reason"])
# fetch: configured, unmeasured (link or engine), faster. recompute: link, decoder (the one that is too slow),
# unmeasured (another prefix measures the link).
RECOMPUTED_TOKENS = Counter("sgl_kvfetch_recomputed_tokens", "Stored tokens recomputed because that was faster")

# Device mode
DEVICE_REQUESTS = Counter("sgl_kvfetch_device_requests", "Requests whose prefix was looked up, by outcome", ["end"])
# The ends of device mode's requests.
ENDS = "landed", "partly", "failed", "recomputed", "missed", "flushed", "aborted"
PARKED_REQUESTS = Gauge("sgl_kvfetch_parked_requests", "Requests waiting for their fetch", multiprocess_mode="livesum")

_RESULTS = {"result": ("hit", "miss")}
# Values of labels that are known beforehand: their samples are 0 from the start on, since `increase` and `rate` do not
# see the first event of a sample that begins with it.
_KNOWN: dict[Counter | Gauge | Histogram, Mapping[str, Iterable[str]]] = {
    LOOKUP_PAGES: _RESULTS,
    FETCHED_PAGES: _RESULTS,
    MISSES: {"stage": ("lookup", "fetch", "load", "write"), "reason": COUNTED},
    READ_CELLS: {"coarseness": map(str, range(4))},
    WIRE_BYTES: {"direction": ("read", "lookup", "write")},
    RAW_BYTES: {"direction": ("read", "write")},
    INDEX_FAILURES: {"reason": get_args(StoreErrorReason)},
    AUDITS: {"result": ("sound", "beyond", "failed")},
    AUDIT_TYPICAL: {"tokens": (*(f"to {most}" for most in LENGTHS), "more")},
    STAGE_SECONDS: {"stage": ("lookup", "transmit", "decode", "restore", "encode", "commit")},
    WRITTEN_PAGES: {
        "result": (
            *("stored", "known", "dropped_full", "dropped_invalid", "dropped_error"),
            *("dropped_data_plane", "dropped_audited"),
        )
    },
    QUEUED_BYTES: {"queue": ("write", "read")},
    LEFT_TO_CPU: {"work": ("decode", "restore", "quantise")},
    DEVICE_REQUESTS: {"end": ENDS},
}
for _metric, _values in _KNOWN.items():
    for _labels in product(*_values.values()):
        _metric.labels(*_labels)
for _basis in ("configured", "unmeasured", "faster"):
    DECISIONS.labels("fetch", _basis)
for _basis in ("link", "decoder", "unmeasured"):
    DECISIONS.labels("recompute", _basis)

# Tasks that a request's task begins have a copy of its context, with the same list in it.
_reasons: ContextVar[list[str] | None] = ContextVar("reasons", default=None)


def miss(stage: str, reason: str) -> None:
    """Count that a lookup, a fetch or a write fell short. ``reason``: one of `reasons.Reason`."""
    MISSES.labels(stage, reason).inc()
    record_reason(reason)


def count_miss(stage: str, error: KVFetchError | TimeoutError) -> None:
    """Count a lookup, a fetch or a write that failed, and log it as `log_failure`."""
    miss(stage, reason_of(error))
    log_failure(stage, error)


def log_failure(stage: str, error: KVFetchError | TimeoutError, meanwhile: str = "") -> None:
    """Log why a lookup, a fetch or a write failed, and what to do: once for all that a failing store causes, until
    `record_success`; else at a limited rate. ``meanwhile``: what happens without it, if pages are not computed."""
    reason = reason_of(error)
    if reason == Reason.SKIPPED:  # nothing was asked, after failures that the log has
        return
    what = str(error) or "it was not done in time"
    meanwhile = meanwhile or ("pages are not stored" if stage == "write" else "pages are computed")
    message = f"kvfetch: {stage} failed, and {meanwhile} ({reason}): {what}. What to do: {ADVICE[reason]}"
    if reason in _OF_STORE:
        _store.failed(reason, _CONNECTION if reason in _OF_CONNECTION else stage, message)
    else:
        _limited.warning(f"{stage} {reason}", message)


def record_success(stage: str) -> None:
    """Record that the store has done a lookup or a write, or that a fetch was whole."""
    if _store.lasting:
        _store.worked(stage, *(() if stage == "fetch" else (_CONNECTION,)))  # of a fetch, all may be from a cache


def record_certificates(ends: Mapping[str, float]) -> None:
    """Record when certificates end, as `tls.ends_of` returns it."""
    for file, end_s in ends.items():
        CERTIFICATE_END.labels(file).set(end_s)


@contextmanager
def counted(stage: str) -> Iterator[None]:
    """Suppress every exception of a lookup or a fetch, and count it. What is cancelled ends; the engine counts it."""
    try:
        yield
    except (KVFetchError, TimeoutError) as e:
        count_miss(stage, e)
    except Exception:
        logger.exception("kvfetch %s failed", stage)
        miss(stage, "internal")


def shortfall(reasons: Sequence[str]) -> str:
    """Return the reason to tell of what was noted: the first one. That computing is sooner counts before all others,
    since nothing was fetched then; that prompts differ, only if there is no other, since that is found before anything
    can go wrong with the pages that they share."""
    return min(reasons, key=lambda reason: (reason != Reason.SOONER, reason == Reason.DIVERGES), default="")


def record_reason(reason: str) -> None:
    """Record why the request that this task serves gets less than is stored. Without one, do nothing."""
    if (reasons := _reasons.get()) is not None:
        reasons.append(reason)


def reasons_here() -> list[str]:
    """Return the list of what is noted from now on, in this task and in those that it begins. The task must be the
    request's own."""
    reasons: list[str] = []
    _reasons.set(reasons)
    return reasons
