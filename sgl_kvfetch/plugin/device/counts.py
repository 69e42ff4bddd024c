"""What device mode counts beside `sgl_kvfetch.metrics`, on every rank. Import it only in processes that serve."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

FLOWS = Counter("sgl_kvfetch_device_requests", "Requests whose prefix was looked up, by how that ended", ["end"])
# landed (all that the store had), partly (the rest failed), full_pool (the rest found no room), failed (all of it),
# missed (not stored, or the lookup failed), known (the tree had got it), lost (the tree had lost what came before it),
# suspended (the weights changed), aborted
PARKED = Gauge("sgl_kvfetch_parked_requests", "Requests that wait for their fetch", multiprocess_mode="livesum")
HELD_SLOTS = Gauge(
    "sgl_kvfetch_held_slots",
    "Slots of the token-to-KV pool that fetches fill, or keep for requests that are not admitted yet",
    multiprocess_mode="livesum",
)
