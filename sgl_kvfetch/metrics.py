"""Prometheus metrics. Import this only in processes that serve: prometheus_client decides at import whether it runs in
SGLang's multi-process mode, and SGLang sets that up after plugins are loaded."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

LOOKUP_PAGES = Counter("sgl_kvfetch_lookup_pages", "Pages looked up", ["result"])  # hit, miss
MISSES = Counter(
    "sgl_kvfetch_misses", "Lookups, fetches, loads and writes that fell short because of an error", ["stage", "reason"]
)  # lookup, fetch, load, write; a `Reason`
FETCHED_PAGES = Counter("sgl_kvfetch_fetched_pages", "Pages requested from fetches", ["result"])  # hit, miss
SIDE_PAGES = Counter(
    "sgl_kvfetch_side_pages", "Pages of SGLang's side pools: stored, or requested from fetches", ["pool", "result"]
)  # stored, hit, miss
READ_CELLS = Counter(
    "sgl_kvfetch_read_cells", "Cells restored, by how many levels of coefficients were left out", ["levels_left_out"]
)
WIRE_BYTES = Counter("sgl_kvfetch_wire_bytes", "Bytes on the wire", ["direction"])  # read, write
RAW_BYTES = Counter("sgl_kvfetch_raw_bytes", "Size of the same pages in the pool", ["direction"])
CORRUPT_CHUNKS = Counter("sgl_kvfetch_corrupt_chunks", "Cells that failed a checksum or did not decode")
DELETED_SEGMENTS = Counter("sgl_kvfetch_deleted_segments", "Segments deleted as damaged, or as an audit found them")
RETRIES = Counter("sgl_kvfetch_retries", "Retried requests to the store")
HEDGED_READS = Counter(
    "sgl_kvfetch_hedged_reads",
    "Second requests to the store, sent when the first one was late, by outcome",
    ["kind", "result"],
)  # lookup, read; won, lost, failed, refused (too many were running)
INDEX_FAILURES = Counter("sgl_kvfetch_index_failures", "Calls of the page index that failed", ["reason"])
LOCAL_CACHE_READ_BYTES = Counter(
    "sgl_kvfetch_local_cache_read_bytes", "Bytes of data read with local_cache, by the tier they came from", ["tier"]
)  # disk, store
LOCAL_CACHE_FILLS = Counter(
    "sgl_kvfetch_local_cache_fills", "Data objects whose copying to local_cache has ended", ["result"]
)  # stored, incomplete (the rest was not read), dropped (no memory, or deleted), failed
LOCAL_CACHE_FAILURES = Counter(
    "sgl_kvfetch_local_cache_failures",
    "Failures of local_cache, each of which costs speed only",
    ["operation", "reason"],
)
LOCAL_CACHE_LOOKUPS = Counter(
    "sgl_kvfetch_local_cache_lookups", "Lookups that local_cache answered because the store failed"
)
MEMORY_CACHE_BYTES = Gauge(
    "sgl_kvfetch_memory_cache_bytes", "Coded bytes that memory_cache holds", multiprocess_mode="livesum"
)
MEMORY_CACHE_READ_BYTES = Counter(
    "sgl_kvfetch_memory_cache_read_bytes", "Coded bytes read from memory_cache instead of the store"
)
DATA_PLANE_STARTS = Counter("sgl_kvfetch_data_plane_restarts", "Data planes replaced because they died or hung")
AUDITS = Counter(
    "sgl_kvfetch_audits", "Comparisons of stored pages with what the engine computed, by result", ["result"]
)
# sound, beyond (audit.most), far (so far beyond that the segment was deleted), failed (it could not be read)
AUDIT_RATIO = Histogram(
    "sgl_kvfetch_audit_ratio",
    "Squared errors of audited pages, as a multiple of what is expected, in the layer where they are worst",
    buckets=(0.01, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 8, 16, 100, 1000, 10000),
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
    "Pages not found behind a beginning that is stored, where the stored prompt goes on with other tokens",
)
WRITTEN_PAGES = Counter("sgl_kvfetch_written_pages", "Pages submitted for writing", ["result"])
# stored, known (the store had them), dropped_full, dropped_invalid, dropped_error, dropped_data_plane (it ended),
# dropped_audited (audits have ended writing)
MERGES = Counter("sgl_kvfetch_merges", "Pairs of segments merged into one of twice the length")
QUEUED_BYTES = Gauge(
    "sgl_kvfetch_queued_bytes",
    "Bytes in queues: write (raw), read (compressed)",
    ["queue"],
    multiprocess_mode="livesum",
)
NAMESPACE = Gauge(
    "sgl_kvfetch_namespace_info",
    "1 for each namespace that this server has opened",
    ["namespace", "model", "quantiser"],
    multiprocess_mode="max",
)
STORE_DOWN = Gauge(
    "sgl_kvfetch_store_down",
    "1 while lookups are skipped, or answered by local_cache, because the store failed",
    multiprocess_mode="livemax",
)

# Fetch or compute
DECISIONS = Counter("sgl_kvfetch_decisions", "Stored prefixes, by decision and its reason", ["decision", "reason"])
# fetch: configured, unmeasured (link or engine), faster. recompute: link, decoder (the one that is too slow),
# unmeasured (another prefix measures the link).
RECOMPUTED_TOKENS = Counter("sgl_kvfetch_recomputed_tokens", "Stored tokens that were computed because that was sooner")

# Device mode
DEVICE_REQUESTS = Counter("sgl_kvfetch_device_requests", "Requests whose prefix was looked up, by outcome", ["end"])
# The ends of device mode's requests.
ENDS = "landed", "partly", "failed", "recomputed", "missed", "flushed", "aborted"
PARKED_REQUESTS = Gauge("sgl_kvfetch_parked_requests", "Requests waiting for their fetch", multiprocess_mode="livesum")
