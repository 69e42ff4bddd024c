"""Delete expired segments of a store, and the least recently used until the rest fits into its capacity and quotas.

For stores that do not evict by themselves. All is decided by one listing: the store alone knows what it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.listing import StoredSegment, folders_named, list_segments, models_of_folders
from sgl_kvfetch.stores.pins import pinned_segments

ORPHAN_AGE_S = 900.0  # data without a manifest, or the reverse, may be a write under way until then
_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    stored_bytes: int  # of everything in the store
    num_segments: int  # those that are whole
    pinned_bytes: int
    num_pinned_evicted: int
    num_expired: int
    evicted: list[StoredSegment]  # expired ones first, then the least recently used; pinned ones after all others
    broken: list[StoredSegment]  # without a manifest or without data, for longer than a write takes
    oldest_use_s: float | None  # of the segments that are kept, in seconds since the epoch
    unused_quotas: list[str]  # names that no namespace of the store has

    @property
    def doomed(self) -> list[StoredSegment]:
        return [*self.broken, *self.evicted]

    @property
    def freed_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.doomed)


@dataclass(slots=True)
class Swept:
    num_objects: int = 0
    num_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # by the object's name


async def plan_sweep(store: Store, capacity_bytes: int | None, quotas: Mapping[str, int] | None = None) -> Plan:
    """List the store and decide what to delete.

    ``quotas``: most bytes of all namespaces together whose digest or model starts with a name. Raises StoreError.
    """
    segments = await list_segments(store, "")
    whole = [segment for segment in segments if segment.manifest is not None and segment.data]
    parts = [segment for segment in segments if segment.manifest is None or not segment.data]
    uses = await store.last_uses([segment.key for segment in whole])
    oldest_write_s = time.time() - ORPHAN_AGE_S
    # One with a newer object may be being written again, data first.
    expired = await store.expired([segment.key for segment in whole if segment.modified_s < oldest_write_s])
    pinned = await pinned_segments(store, {segment.key.namespace for segment in whole})
    last_uses = {s.key: max(used or 0.0, s.modified_s) for s, used in zip(whole, uses, strict=True)}

    def order(segment: StoredSegment) -> tuple[bool, bool, float]:
        return segment.key not in expired, segment.key in pinned, last_uses[segment.key]

    in_order = sorted(whole, key=order)
    broken = [segment for segment in parts if segment.modified_s < oldest_write_s]
    doomed = expired | {segment.key for segment in broken}

    def shrink(folders: Container[str], most_bytes: int) -> None:
        inside = [segment for segment in segments if segment.key.namespace in folders]
        lacking = sum(segment.stored_bytes for segment in inside if segment.key not in doomed) - most_bytes
        for segment in in_order:
            if lacking > 0 and segment.key.namespace in folders and segment.key not in doomed:
                doomed.add(segment.key)
                lacking -= segment.stored_bytes

    models = await models_of_folders(store, reversed(in_order)) if quotas else {}
    unused_quotas = []
    for name, most_bytes in (quotas or {}).items():
        folders = folders_named(name, models)
        shrink(folders, most_bytes)
        if not folders:
            unused_quotas.append(name)
    if capacity_bytes is not None:
        shrink({segment.key.namespace for segment in segments}, capacity_bytes)
    evicted = [segment for segment in in_order if segment.key in doomed]
    return Plan(
        stored_bytes=sum(segment.stored_bytes for segment in segments),
        num_segments=len(whole),
        pinned_bytes=sum(segment.stored_bytes for segment in whole if segment.key in pinned),
        num_pinned_evicted=sum(segment.key in pinned for segment in evicted),
        num_expired=len(expired),
        evicted=evicted,
        broken=broken,
        oldest_use_s=min((last_uses[segment.key] for segment in whole if segment.key not in doomed), default=None),
        unused_quotas=unused_quotas,
    )


async def sweep_segments(store: Store, segments: Sequence[StoredSegment], grace_s: float) -> Swept:
    """Delete segments: their manifests, and after ``grace_s``, when their readers are done, their data.

    Objects that cannot be deleted are reported and stay: a later sweep finds them. Raises StoreError if the store or
    its index cannot be used at all.
    """
    swept = Swept()

    async def delete(name: str, num_bytes: int) -> None:
        try:
            if await store.delete(name):
                swept.num_objects += 1
                swept.num_bytes += num_bytes
        except StoreError as e:
            if not e.concerns_object:
                raise
            swept.failures[name] = str(e)

    async def delete_data(segment: StoredSegment) -> None:
        if await store.head(segment.key.manifest_name) is None:  # it has not been written again meanwhile
            for info in segment.data.values():
                await delete(info.name, info.size_bytes)

    manifests = [segment.manifest for segment in segments if segment.manifest is not None]
    await side_by_side(_WORKERS, manifests, lambda info: delete(info.name, info.size_bytes))
    if any(segment.manifest is not None and segment.data for segment in segments):
        await asyncio.sleep(grace_s)
    await side_by_side(_WORKERS, [segment for segment in segments if segment.data], delete_data)
    return swept
