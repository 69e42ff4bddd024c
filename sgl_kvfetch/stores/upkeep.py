"""A whole store, object by object: list it, summarise it, and delete what has to go.

For the commands that look after a store that does not evict by itself, and for directories, which delete in the same
order. What a sweep deletes is decided by one listing: the store alone knows what it has. Only the manifests of segments
that may become coarser are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_kvfetch.codec import Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError, KVFetchError, StoreError
from sgl_kvfetch.keys import Labels, SegmentKey, are_named, parse_object_name
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores.base import AdminStore, ObjectInfo, Store
from sgl_kvfetch.stores.notes import pinned_segments


class EvictionRank(NamedTuple):
    """Segments are deleted by ascending rank: expired ones first, pinned ones after all others, and among equals those
    that were used longest ago."""

    live: bool  # not expired
    pinned: bool
    last_used: float


_, *_COLUMNS = EvictionRank._fields
LIVE_RANK_SQL = ", ".join(_COLUMNS)  # to sort segments that have not expired, in a table with these columns


@dataclass(slots=True)
class StoredSegment:
    """The objects of one segment. Without a manifest, they are only data that no lookup finds."""

    key: SegmentKey
    manifest: ObjectInfo | None = None
    data: dict[str, ObjectInfo] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Total size of manifest and data."""
        own = self.manifest.size_bytes if self.manifest else 0
        return own + sum(info.size_bytes for info in self.data.values())

    @property
    def modified_s(self) -> float:
        """When the segment's last object was put, in seconds since the epoch."""
        infos = [*self.data.values(), *([self.manifest] if self.manifest else [])]
        return max(info.modified_s for info in infos)


async def list_segments(store: AdminStore, prefix: str) -> list[StoredSegment]:
    """List the segments whose objects' names start with ``prefix``, sorted by name."""
    segments: dict[str, StoredSegment] = {}
    async for info in store.list(prefix):
        parsed = parse_object_name(info.name)
        segment = segments.setdefault(parsed.segment.stem, StoredSegment(parsed.segment))
        if parsed.is_manifest:
            segment.manifest = info
        else:
            segment.data[info.name] = info
    return [segments[stem] for stem in sorted(segments)]


async def read_manifest(store: Store, name: str) -> Manifest | None:
    """Read and decode a manifest; None if it is gone. Raises FormatError, also if it belongs under another name."""
    content = await store.get(name)
    return None if content is None else decode_named_manifest(content, name)


async def first_readable_manifest(store: Store, segments: Iterable[StoredSegment]) -> Manifest | None:
    """Read the first manifest that is there and decodes; None if there is none. Raises StoreError
    if the store cannot be used."""
    for segment in segments:
        try:
            manifest = await read_manifest(store, segment.key.manifest_name)
        except FormatError:
            continue  # ``kvfetch verify`` reports those
        except StoreError as e:
            if not e.concerns_object:
                raise
            continue
        if manifest is not None:
            return manifest
    return None


class FolderNames(NamedTuple):
    """The names of a folder for people: the model of its namespace, and the labels of one of its segments."""

    model: str
    labels: Labels


def folders_named(name: str, names: Mapping[str, FolderNames]) -> set[str]:
    """Return the folders of the model that is called ``name``; if there is none, those whose digest, label or model
    starts with it. ``names``: as of ``names_of_folders``."""
    if exact := {folder for folder, (model, labels) in names.items() if are_named(name, model, labels)}:
        return exact
    return {
        folder
        for folder, (model, labels) in names.items()
        if name and any(each.startswith(name) for each in (folder, model, model.partition(":")[2], labels.model))
    }


async def names_of_folders(store: Store, segments: Iterable[StoredSegment]) -> dict[str, FolderNames]:
    """Return what each folder is called; a folder has no name if none of its manifests can be read. Raises StoreError.

    Reads one manifest a folder, the first. In a directory, reading counts as a use: begin with the last used segments.
    """
    folders: dict[str, list[StoredSegment]] = {}
    for segment in segments:
        folders.setdefault(segment.key.namespace, []).append(segment)
    names = {}
    for folder, inside in folders.items():
        manifest = await first_readable_manifest(store, inside)
        names[folder] = FolderNames("", Labels())
        if manifest is not None:
            names[folder] = FolderNames(manifest.namespace.model, manifest.labels)
    return names


def decode_named_manifest(content: bytes, name: str) -> Manifest:
    """Decode the manifest that is stored as ``name``. Raises FormatError, also if it belongs under another name."""
    manifest = decode_manifest(content)
    if manifest.key.manifest_name != name:
        raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
    return manifest


async def pages_stored(store: Store, hashes: Sequence[bytes]) -> dict[str, int]:
    """Return how many of a prompt's pages a lookup finds with all heads, by namespace.

    Ranks store their own heads, in folders of their own. Raises StoreError and FormatError.
    """
    runs: dict[str, int] = {}
    num_heads: dict[str, int] = {}
    for folder in await store.folders():
        if (found := await store.lookup(folder, hashes)).hits:
            runs[folder] = found.num_pages
            if (namespace := folder.partition(".")[0]) not in num_heads:
                num_heads[namespace] = decode_manifest(found.hits[0].manifest).namespace.num_heads
    return whole_pages(runs, num_heads)


def whole_pages(runs: Mapping[str, int], num_heads: Mapping[str, int]) -> dict[str, int]:
    """Return how many pages are stored with all heads, by namespace.

    ``runs``: how many pages each folder has in a row. ``num_heads``: of the model, by namespace; others are left out.
    """
    pages_of_heads: dict[str, list[int]] = {namespace: [0] * heads for namespace, heads in num_heads.items()}
    for folder, num_pages in runs.items():
        namespace, _, heads = folder.partition(".")
        pages = pages_of_heads.get(namespace, [])
        for head in range(*map(int, heads.split("-"))):
            if head < len(pages):
                pages[head] = max(pages[head], num_pages)
    return {namespace: min(pages) for namespace, pages in pages_of_heads.items()}


ORPHAN_AGE_S = 900.0  # data without a manifest, or the reverse, may be a write under way until then
_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Coarser:
    """A segment that is to become coarser. ``leftovers``: data that its manifest does not name."""

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
    are_kept: bool = False  # the bytes: the bucket has versions
    failures: dict[str, str] = field(default_factory=dict)  # by the object's name


async def plan_sweep(store: AdminStore, capacity_bytes: int | None, drop_levels: int = 0) -> Plan:
    """List the store and decide what to delete. ``drop_levels``: the most that a segment loses before any segment is
    evicted. Raises StoreError."""
    segments = await list_segments(store, "")
    whole = [segment for segment in segments if segment.manifest is not None and segment.data]
    parts = [segment for segment in segments if segment.manifest is None or not segment.data]
    uses = await store.last_uses([segment.key for segment in whole])
    oldest_write_s = time.time() - ORPHAN_AGE_S
    # A segment with a newer object may be on its way to being written again, data first.
    expired = await store.expired([segment.key for segment in whole if segment.modified_s < oldest_write_s])
    pinned = await pinned_segments(store, [segment.key for segment in whole])
    # Of the data alone: a manifest is also replaced where nobody uses the segment, as when it becomes coarser.
    last_writes = {s.key: max(info.modified_s for info in s.data.values()) for s in whole}
    last_uses = {s.key: max(used or 0.0, last_writes[s.key]) for s, used in zip(whole, uses, strict=True)}

    def rank(segment: StoredSegment) -> EvictionRank:
        return EvictionRank(segment.key not in expired, segment.key in pinned, last_uses[segment.key])

    in_order = sorted(whole, key=rank)
    broken = [segment for segment in parts if segment.modified_s < oldest_write_s]
    doomed = expired | {segment.key for segment in broken}

    coarser: dict[SegmentKey, Coarser] = {}
    if capacity_bytes is not None:
        left = [segment for segment in segments if segment.key not in doomed]
        lacking = sum(segment.stored_bytes for segment in left) - capacity_bytes
        may_lose = [segment for segment in in_order if not {segment.key} & (doomed | pinned)]
        while drop_levels and lacking > 0 and may_lose:
            some, may_lose = may_lose[:_WORKERS], may_lose[_WORKERS:]
            for found in await asyncio.gather(*(_coarser(store, segment, drop_levels) for segment in some)):
                if lacking > 0 and found is not None:
                    coarser[found.segment.key] = found
                    lacking -= found.num_bytes
        for segment in in_order:
            if lacking > 0 and segment.key not in doomed:
                doomed.add(segment.key)
                lacking -= segment.stored_bytes - (coarser.pop(segment.key).num_bytes if segment.key in coarser else 0)
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
    )


async def _coarser(store: AdminStore, segment: StoredSegment, drop_levels: int) -> Coarser | None:
    """Return how a segment can become coarser, ``drop_levels`` times at most with those before; None if it cannot."""
    if len(segment.data) == 1:
        return None
    try:
        content = await store.peek(segment.key.manifest_name)
        manifest = None if content is None else decode_named_manifest(content, segment.key.manifest_name)
    except KVFetchError as e:
        if not e.concerns_object:
            raise
        return None  # ``kvfetch verify`` reports those
    if manifest is None:
        return None
    infos, oldest_write_s = segment.data.values(), time.time() - ORPHAN_AGE_S
    leftovers = [x for x in infos if x.name not in manifest.data_names and x.modified_s < oldest_write_s]
    count = max(0, min(manifest.num_droppable, drop_levels - manifest.num_dropped))
    kept = manifest.coarser_by(count).data_names
    num_bytes = sum(size for name, size in manifest.data_sizes.items() if name not in kept)
    num_bytes += sum(info.size_bytes for info in leftovers)
    return Coarser(segment, count, num_bytes, leftovers) if num_bytes else None


async def sweep_segments(
    store: AdminStore,
    segments: Sequence[StoredSegment],
    grace_s: float,
    coarser: Sequence[Coarser] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Delete segments: their manifests, and after ``grace_s``, when their readers are done, their data. Likewise what
    ``coarser`` ones lose. ``say``: is told what comes next, if it takes long.

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
            record(await store.delete(info.name), info.size_bytes)

    async def delete_data(sizes: Mapping[str, int]) -> None:
        """Delete data objects of a segment, but for those that a writer has named again meanwhile."""
        for name, num_bytes in sizes.items():
            with noting_failures(name):
                record(await store.delete_unnamed(name), num_bytes)

    def record(existed: bool, num_bytes: int) -> None:
        swept.num_objects += existed
        swept.num_bytes += num_bytes * existed

    unnamed: dict[SegmentKey, dict[str, int]] = {}

    async def drop_levels(each: Coarser) -> None:
        name = each.segment.key.manifest_name
        unneeded = unnamed.setdefault(each.segment.key, {info.name: info.size_bytes for info in each.leftovers})
        with noting_failures(name):
            for _ in range(each.num_levels):
                dropped = await store.coarsen(name)
                swept.num_levels += bool(dropped)
                unneeded |= dropped

    manifests = [segment.manifest for segment in segments if segment.manifest is not None]
    await side_by_side(_WORKERS, manifests, delete_manifest)
    await side_by_side(_WORKERS, coarser, drop_levels)
    if unnamed or any(segment.manifest is not None and segment.data for segment in segments):
        if grace_s:
            say(f"{len(manifests)} manifests are deleted; their data follows in {grace_s:g} s, after its last readers")
        await asyncio.sleep(grace_s)
    of_segments = [{info.name: info.size_bytes for info in segment.data.values()} for segment in segments]
    await side_by_side(_WORKERS, [*of_segments, *unnamed.values()], delete_data)
    swept.are_kept = store.keeps_deleted
    return swept
