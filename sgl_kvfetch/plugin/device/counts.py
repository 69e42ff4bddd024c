"""What device mode counts beside `sgl_kvfetch.metrics`, on every rank. Import it only in processes that serve."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

FLOWS = Counter("sgl_kvfetch_device_requests", "Requests whose prefix was looked up, by how that ended", ["end"])
# The ends are those of `flow.End`, and aborted.
DECISIONS = Counter(
    "sgl_kvfetch_device_decisions", "Stored prefixes by what was decided, and by the reason", ["decision", "reason"]
)
# fetch: configured, unmeasured (link or engine), faster. recompute: link, decoder (which of them is too slow).
PARKED = Gauge("sgl_kvfetch_parked_requests", "Requests that wait for their fetch", multiprocess_mode="livesum")
HELD_SLOTS = Gauge(
    "sgl_kvfetch_held_slots",
    "Slots of the token-to-KV pool that fetches fill, or keep for requests that are not admitted yet",
    multiprocess_mode="livesum",
)
