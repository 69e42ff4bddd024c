"""Delete expired segments of a store, and levels and segments of those used least until the rest fits into its
capacity and quotas.

For stores that do not evict by themselves. All is decided by one listing: the store alone knows what it has. Only the
manifests of segments that may lose levels are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sgl_kvfetch.codec import num_droppable, signed_by
from sgl_kvfetch.codec.container import coarser_by
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores.base import AdminStore, ObjectInfo
from sgl_kvfetch.stores.pins import pinned_segments
from sgl_kvfetch.stores.upkeep.eviction import EvictionRank
from sgl_kvfetch.stores.upkeep.listing import (
    StoredSegment,
    decode_named_manifest,
    folders_named,
    list_segments,
    names_of_folders,
)

ORPHAN_AGE_S = 900.0  # data without a manifest, or the reverse, may be a write under way until then
_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Coarser:
    """A segment that is to lose its last levels. ``leftovers``: data that its manifest does not name."""

    segment: StoredSegment
    num_levels: int
    num_bytes: int
    leftovers: list[ObjectInfo]


@dataclass(frozen=True, slots=True)
class Plan:
    stored_bytes: int  # of everything in the store
    num_segments: int  # those that are whole
    pinned_bytes: int
    num_pinned_evicted: int
    num_expired: int
    evicted: list[StoredSegment]  # expired ones first, then the least recently used; pinned ones after all others
    broken: list[StoredSegment]  # without a manifest or without data, for longer than a write takes
    coarser: list[Coarser]  # the least recently used first
    oldest_use_s: float | None  # of the segments that are kept, in seconds since the epoch
    unused_quotas: list[str]  # names of which nothing is stored

    @property
    def doomed(self) -> list[StoredSegment]:
        return [*self.broken, *self.evicted]

    @property
    def freed_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.doomed) + sum(each.num_bytes for each in self.coarser)


@dataclass(slots=True)
class Swept:
    num_objects: int = 0
    num_bytes: int = 0
    num_levels: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # by the object's name


async def plan_sweep(
    store: AdminStore, capacity_bytes: int | None, quotas: Mapping[str, int] | None = None, drop_levels: int = 0
) -> Plan:
    """List the store and decide what to delete.

    ``quotas``: most bytes of all namespaces together that have a name, as of `folders_named`. ``drop_levels``: the
    most that a segment loses before any segment is evicted. Raises StoreError.
    """
    segments = await list_segments(store, "")
    whole = [segment for segment in segments if segment.manifest is not None and segment.data]
    parts = [segment for segment in segments if segment.manifest is None or not segment.data]
    uses = await store.last_uses([segment.key for segment in whole])
    oldest_write_s = time.time() - ORPHAN_AGE_S
    # A segment with a newer object may be on its way to being written again, data first.
    expired = await store.expired([segment.key for segment in whole if segment.modified_s < oldest_write_s])
    pinned = await pinned_segments(store, {segment.key.namespace for segment in whole})
    # Of the data alone: a manifest is also replaced where nobody uses the segment, as when it loses levels.
    last_writes = {s.key: max(info.modified_s for info in s.data.values()) for s in whole}
    last_uses = {s.key: max(used or 0.0, last_writes[s.key]) for s, used in zip(whole, uses, strict=True)}

    def rank(segment: StoredSegment) -> EvictionRank:
        return EvictionRank(segment.key not in expired, segment.key in pinned, last_uses[segment.key])

    in_order = sorted(whole, key=rank)
    broken = [segment for segment in parts if segment.modified_s < oldest_write_s]
    doomed = expired | {segment.key for segment in broken}

    coarser: dict[SegmentKey, Coarser] = {}

    async def shrink(folders: Container[str], most_bytes: int) -> None:
        inside = [segment for segment in segments if segment.key.namespace in folders and segment.key not in doomed]
        lacking = sum(segment.stored_bytes for segment in inside) - most_bytes
        lacking -= sum(coarser[segment.key].num_bytes for segment in inside if segment.key in coarser)
        may_lose = [
            segment
            for segment in in_order
            if segment.key.namespace in folders and not {segment.key} & (doomed | pinned) and segment.key not in coarser
        ]
        while drop_levels and lacking > 0 and may_lose:
            some, may_lose = may_lose[:_WORKERS], may_lose[_WORKERS:]
            for found in await asyncio.gather(*(_coarser(store, segment, drop_levels) for segment in some)):
                if lacking > 0 and found is not None:
                    coarser[found.segment.key] = found
                    lacking -= found.num_bytes
        for segment in in_order:
            if lacking > 0 and segment.key.namespace in folders and segment.key not in doomed:
                doomed.add(segment.key)
                lacking -= segment.stored_bytes - (coarser.pop(segment.key).num_bytes if segment.key in coarser else 0)

    names = await names_of_folders(store, reversed(in_order)) if quotas else {}
    unused_quotas = []
    for name, most_bytes in (quotas or {}).items():
        folders = folders_named(name, names)
        await shrink(folders, most_bytes)
        if not folders:
            unused_quotas.append(name)
    if capacity_bytes is not None:
        await shrink({segment.key.namespace for segment in segments}, capacity_bytes)
    evicted = [segment for segment in in_order if segment.key in doomed]
    return Plan(
        stored_bytes=sum(segment.stored_bytes for segment in segments),
        num_segments=len(whole),
        pinned_bytes=sum(segment.stored_bytes for segment in whole if segment.key in pinned),
        num_pinned_evicted=sum(segment.key in pinned for segment in evicted),
        num_expired=len(expired),
        evicted=evicted,
        broken=broken,
        coarser=list(coarser.values()),
        oldest_use_s=min((last_uses[segment.key] for segment in whole if segment.key not in doomed), default=None),
        unused_quotas=unused_quotas,
    )


async def _coarser(store: AdminStore, segment: StoredSegment, drop_levels: int) -> Coarser | None:
    """Return how a segment can lose levels, ``drop_levels`` at most with those that it has lost; None if it cannot."""
    if len(segment.data) == 1:
        return None
    try:
        content = await store.peek(segment.key.manifest_name)
        manifest = None if content is None else decode_named_manifest(content, segment.key.manifest_name)
    except KVFetchError as e:
        if not e.concerns_object:
            raise
        return None  # ``kvfetch verify`` reports those
    if content is None or manifest is None:
        return None
    infos, oldest_write_s = segment.data.values(), time.time() - ORPHAN_AGE_S
    leftovers = [x for x in infos if x.name not in manifest.data_names and x.modified_s < oldest_write_s]
    count = max(0, min(num_droppable(manifest, content), drop_levels - manifest.num_dropped))
    kept = coarser_by(manifest, count).data_names
    num_bytes = sum(size for name, size in manifest.data_sizes.items() if name not in kept)
    if count and signed_by(content) == content:
        num_bytes -= len(content)  # which the new manifest carries
    num_bytes += sum(info.size_bytes for info in leftovers)
    return Coarser(segment, count, num_bytes, leftovers) if num_bytes else None


async def sweep_segments(
    store: AdminStore, segments: Sequence[StoredSegment], grace_s: float, coarser: Sequence[Coarser] = ()
) -> Swept:
    """Delete segments: their manifests, and after ``grace_s``, when their readers are done, their data. Likewise the
    last levels of ``coarser``.

    Objects that cannot be deleted are reported and stay: a later sweep finds them. Raises StoreError if the store or
    its index cannot be used at all.
    """
    swept = Swept()

    @contextmanager
    def noting_failures(name: str) -> Iterator[None]:
        try:
            yield
        except KVFetchError as e:
            if not e.concerns_object:
                raise
            swept.failures[name] = str(e)

    async def delete_manifest(info: ObjectInfo) -> None:
        with noting_failures(info.name):
            note(await store.delete(info.name), info.size_bytes)

    async def delete_data(sizes: Mapping[str, int]) -> None:
        """Delete data objects of a segment, but for those that a writer has named again meanwhile."""
        for name, num_bytes in sizes.items():
            with noting_failures(name):
                note(await store.delete_unnamed(name), num_bytes)

    def note(existed: bool, num_bytes: int) -> None:
        swept.num_objects += existed
        swept.num_bytes += num_bytes * existed

    unnamed: dict[SegmentKey, dict[str, int]] = {}

    async def drop_levels(each: Coarser) -> None:
        name = each.segment.key.manifest_name
        unneeded = unnamed.setdefault(each.segment.key, {info.name: info.size_bytes for info in each.leftovers})
        with noting_failures(name):
            for _ in range(each.num_levels):
                dropped = await store.drop_level(name)
                swept.num_levels += bool(dropped)
                unneeded |= dropped

    manifests = [segment.manifest for segment in segments if segment.manifest is not None]
    await side_by_side(_WORKERS, manifests, delete_manifest)
    await side_by_side(_WORKERS, coarser, drop_levels)
    if unnamed or any(segment.manifest is not None and segment.data for segment in segments):
        await asyncio.sleep(grace_s)
    of_segments = [{info.name: info.size_bytes for info in segment.data.values()} for segment in segments]
    await side_by_side(_WORKERS, [*of_segments, *unnamed.values()], delete_data)
    return swept
