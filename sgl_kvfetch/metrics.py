"""What we count. Import this only in processes that serve: prometheus_client decides at import whether it runs in
SGLang's multi-process mode, and SGLang sets that up after plugins are loaded."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

LOOKUP_PAGES = Counter("sgl_kvfetch_lookup_pages", "Pages looked up", ["result"])  # hit, miss
MISSES = Counter(
    "sgl_kvfetch_misses", "Lookups and fetches that fell short because something went wrong", ["stage", "reason"]
)
FETCHED_PAGES = Counter("sgl_kvfetch_fetched_pages", "Pages asked of a fetch", ["result"])  # hit, miss
WIRE_BYTES = Counter("sgl_kvfetch_wire_bytes", "Bytes on the wire", ["direction"])  # read, write
RAW_BYTES = Counter("sgl_kvfetch_raw_bytes", "The same pages as they are in the pool", ["direction"])
CORRUPT_CHUNKS = Counter("sgl_kvfetch_corrupt_chunks", "Cells that failed a checksum or did not decode")
DELETED_SEGMENTS = Counter("sgl_kvfetch_deleted_segments", "Segments deleted because they were corrupt, twice read")
RETRIES = Counter("sgl_kvfetch_retries", "Requests to the store that were tried again")
RACES = Counter(
    "sgl_kvfetch_races",
    "Second requests beside one that brought nothing or was late, and how they ended",
    ["kind", "result"],
)  # lookup, read; won, lost, failed, refused (there were too many)
REPLICA_FAILURES = Counter(
    "sgl_kvfetch_replica_failures", "Requests that one of the store's replicas failed", ["replica", "reason"]
)
DATA_PLANE_STARTS = Counter("sgl_kvfetch_data_plane_restarts", "Data planes that died or hung, and were replaced")
SUSPENSIONS = Counter("sgl_kvfetch_suspensions", "Backends switched off because the model's weights were changed")
STAGE_SECONDS = Histogram(
    "sgl_kvfetch_stage_seconds",
    "Time of one unit of a stage: lookup, transmit, decode, restore, encode, commit",
    ["stage"],
    buckets=_STAGE_BUCKETS,
)
WRITTEN_PAGES = Counter("sgl_kvfetch_written_pages", "Pages handed over for writing", ["result"])
# stored, known (the store had them), dropped_full, dropped_invalid, dropped_error
NVENC_BITSTREAMS = Counter("sgl_kvfetch_nvenc_bitstreams", "Bitstreams that NVENC was to make", ["result"])
# encoded, fallback (on the CPU instead); of them checked (decoded again), wrong (other values came out)
MERGES = Counter("sgl_kvfetch_merges", "Pairs of segments merged into one of twice the length")
QUEUED_BYTES = Gauge(
    "sgl_kvfetch_queued_bytes",
    "Bytes that wait, by queue: write (raw), read (compressed)",
    ["queue"],
    multiprocess_mode="livesum",
)
STORE_DOWN = Gauge(
    "sgl_kvfetch_store_down", "1 while lookups are skipped because the store failed", multiprocess_mode="max"
)

# Device mode
DEVICE_REQUESTS = Counter(
    "sgl_kvfetch_device_requests", "Requests whose prefix was looked up, by how that ended", ["end"]
)
# The ends are those of `End` in plugin/device/fetch_state.py, and aborted.
DEVICE_DECISIONS = Counter(
    "sgl_kvfetch_device_decisions", "Stored prefixes by what was decided, and by the reason", ["decision", "reason"]
)
# fetch: configured, unmeasured (link or engine), faster. recompute: link, decoder (which of them is too slow).
PARKED_REQUESTS = Gauge(
    "sgl_kvfetch_parked_requests", "Requests that wait for their fetch", multiprocess_mode="livesum"
)
HELD_SLOTS = Gauge(
    "sgl_kvfetch_held_slots",
    "Slots of the token-to-KV pool that fetches fill, or keep for requests that are not admitted yet",
    multiprocess_mode="livesum",
)
