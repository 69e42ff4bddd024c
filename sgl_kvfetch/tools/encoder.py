"""Transcode a store's segments to the wanted variants, while readers, writers and other encoders use the store.

The steps for each segment are ordered so that a crash at any point loses nothing: put the new data, read it back and
decode all of it, replace the manifest if it is still the one that was read, and after the grace period delete data that
the new manifest does not name. No state is kept on disk: the store itself shows the remaining work.

Which variants a segment should have, and how they are made of one that it has, changes no integer and no scale.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import torch

from sgl_kvfetch.codec import (
    CODECS,
    NO_KEYS,
    CodedChunk,
    CodedSegment,
    Manifest,
    Quantiser,
    SegmentReader,
    StoreKeys,
    Variant,
    open_manifest,
    quantiser_from_identity,
    require_rewritable,
    require_writable,
    secure_segment,
)
from sgl_kvfetch.codec.bitstream.registry import can_decode, decode_cost, resolution_for
from sgl_kvfetch.codec.container.manifest import MAX_VARIANTS
from sgl_kvfetch.codec.container.segment import encode_cell, layouts_of, make_variant
from sgl_kvfetch.codec.layout.frames import RESOLUTIONS, Layout
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError, KVFetchError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import AdminStore, ObjectInfo, object_digest, with_keys
from sgl_kvfetch.stores.upkeep import StoredSegment, decode_named_manifest, list_segments

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """A codec and a resolution to encode a segment with."""

    codec: str
    resolution: str


def make_targets(codecs: Sequence[str], resolutions: Sequence[str]) -> tuple[Target, ...]:
    """Return each codec at each resolution, or once if it knows none. The first is the default of readers.

    Raises ConfigError."""
    for what, names in (("codec", codecs), ("resolution", resolutions)):
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{what}s are {', '.join(names) or 'none'}; expected at least one, and each once")
    for name in codecs:
        require_writable(name)
    for name in resolutions:
        if name not in RESOLUTIONS:
            raise ConfigError(f"resolution {name!r} is unknown; known are {', '.join(RESOLUTIONS)}")
    pairs = ((codec, resolution) for codec in codecs for resolution in resolutions)
    targets = tuple(dict.fromkeys(Target(codec, resolution_for(codec, resolution)) for codec, resolution in pairs))
    if len(targets) > MAX_VARIANTS:
        raise ConfigError(f"{len(targets)} variants are wanted; a segment has at most {MAX_VARIANTS}")
    return targets


def find_variant(manifest: Manifest, target: Target) -> Variant | None:
    return next((v for v in manifest.variants if (v.codec, v.resolution) == target), None)


def is_done(manifest: Manifest, targets: Sequence[Target], keep_source: bool) -> bool:
    """Return whether the wanted variants come first, in order. Others may follow only with ``keep_source``. Nothing is
    made of a segment that has lost levels."""
    if manifest.num_dropped:
        return True
    found = [(v.codec, v.resolution) for v in manifest.variants]
    return found[: len(targets)] == list(targets) and (keep_source or len(found) == len(targets))


def with_variants(
    manifest: Manifest, targets: Sequence[Target], made: Manifest | None, keep_source: bool
) -> tuple[Variant, ...]:
    """Return the variants for the new manifest: wanted ones from ``made``, or else from ``manifest``, then others."""
    wanted = []
    for target in targets:
        variant = (made and find_variant(made, target)) or find_variant(manifest, target)
        assert variant is not None, target
        wanted.append(variant)
    others = [v for v in manifest.variants if (v.codec, v.resolution) not in targets]
    return tuple(wanted + others)[:MAX_VARIANTS] if keep_source else tuple(wanted)


def cheapest_variant(manifest: Manifest) -> int:
    """Return the index of the variant that is cheapest to decode. Raises FormatError if none can be decoded here."""
    readable = [i for i, v in enumerate(manifest.variants) if can_decode(v.codecs)]
    if not readable:
        found = sorted(set().union(*(v.codecs for v in manifest.variants)))
        raise FormatError(f"no variant can be decoded here: codecs are {', '.join(found)}, known {', '.join(CODECS)}")
    return min(
        readable,
        key=lambda i: (
            decode_cost(manifest.variants[i].codecs),
            sum(each.size_bytes for each in manifest.variants[i].objects),
        ),
    )


def transcode(
    manifest: Manifest,
    data: bytes,
    targets: Sequence[Target],
    source: int = 0,
    *,
    levels: Sequence[bytes] = (),
    before_cell: Callable[[], None] = lambda: None,
) -> CodedSegment:
    """Return the same segment with ``targets`` as its variants, without side pages. ``data`` is the data object of
    variant ``source``, ``levels`` those of its levels.

    Needs no profile. Verifies every checksum of the source; checksums of decoded values are the same in all variants.
    Memory use: the coded bytes and one decoded cell. ``before_cell`` may raise to abort. Raises
    CorruptError, FormatError, also if the source has lost levels, and UnsupportedError if a target does not suit the
    quantiser.
    """
    quantiser = quantiser_from_identity(manifest.namespace.quantiser)
    reader = SegmentReader(manifest, quantiser, source)
    if reader.coarseness:
        raise FormatError(f"{manifest.key.stem} has lost {reader.coarseness} levels: it is no source for others")
    ways = [(target.codec, target_layouts(manifest, quantiser, target.resolution)) for target in targets]
    # With short spans, several resolutions have the same layout. Encode it only once.
    coded: dict[int, list[CodedChunk]] = {ways.index(way): [] for way in ways}
    for cell in manifest.cells():
        before_cell()
        quantised = reader.decode_cell(cell, reader.chunks_in(cell, (data, *levels)))
        for index, chunks in coded.items():
            codec, layouts = ways[index]
            chunks += encode_cell(manifest, cell, quantised, layouts, codec)
    made = [
        make_variant(coded[ways.index(way)], way[1], target.codec, target.resolution)
        for target, way in zip(targets, ways, strict=True)
    ]
    variants = tuple(variant for variant, _ in made)
    require_same_content(manifest, *variants)
    first, *more = (data for _, data in made)
    made_only = msgspec.structs.replace(manifest, variants=variants, sides=(), ciphers={})
    return CodedSegment(made_only, first, tuple(more))


def target_layouts(manifest: Manifest, quantiser: Quantiser, resolution: str) -> dict[str, Layout]:
    """Return the layouts for this resolution: those of an existing variant if there is one, else the default ones."""
    for variant in manifest.variants:
        if variant.resolution == resolution:
            return dict(variant.layouts)
    return layouts_of(manifest, quantiser, resolution)


def require_same_content(manifest: Manifest, *variants: Variant) -> None:
    """Raise CorruptError unless all variants list the same checksums of decoded values."""
    expected = manifest.variants[0].contents
    for variant in (*manifest.variants, *variants):
        if variant.contents != expected:
            raise CorruptError(f"variants of {manifest.key.stem} have different checksums of decoded values")


def verify_variant(
    manifest: Manifest,
    variant: int,
    data: bytes,
    *,
    levels: Sequence[bytes] = (),
    before_cell: Callable[[], None] = lambda: None,
) -> None:
    """Decode a variant's whole data object, and its levels'. Raises CorruptError or FormatError unless every checksum
    matches."""
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser), variant)
    objects = data, *levels
    for name, each, rows in zip(reader.object_names, objects, reader.variant.objects, strict=True):
        if len(each) != (expected := rows.size_bytes):
            raise CorruptError(f"{name} has {len(each)} bytes, expected {expected}")
    for cell in manifest.cells():
        before_cell()
        reader.decode_cell(cell, reader.chunks_in(cell, objects))


T = TypeVar("T")

_MANIFEST_READS = 16  # concurrent
_MAX_ROUNDS = 3  # rounds are repeated for segments that change while they are encoded


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    targets: tuple[Target, ...]
    prefix: str = ""  # only objects whose name starts with it
    keep_source: bool = False  # keep other variants behind the wanted ones
    grace_s: float = 60.0  # how long to keep data that no manifest names any more
    workers: int = 1  # segments at once, each with a thread and its data in memory


@dataclass(slots=True)
class Tally:
    """Counts of the work done. Bytes are totals of encoded segments: raw as in the pool, stored before and after."""

    num_done: int = 0  # segments that had the wanted variants already
    num_encoded: int = 0
    num_changed: int = 0  # deleted or replaced by another process meanwhile
    raw_bytes: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    num_deleted: int = 0  # data objects that no manifest named any more
    deleted_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # manifest's name -> error


class _Changed(Exception):
    """Another process deleted or replaced the segment."""


class _Stopped(Exception):
    """The encoder is closing, and nobody waits for the result."""


class Encoder:
    """Encodes the segments of one store. Belongs to one event loop.

    ``on_progress`` gets how many segments have been dealt with, of how many that are to be encoded; each step is logged
    with its object's name. With ``keys``, encrypts, and encodes only what is encrypted.
    """

    def __init__(
        self,
        store: AdminStore,
        options: EncodeOptions,
        *,
        keys: StoreKeys = NO_KEYS,
        on_progress: Callable[[int, int], None] = lambda finished, total: None,
    ) -> None:
        """Do nothing yet. The options bound its threads."""
        self.tally = Tally()
        self.garbage = Garbage(store, options.grace_s)
        self._objects = store
        self._store = with_keys(store, keys)
        self._options = options
        self._on_progress = on_progress
        self._num_finished = self._num_wanted = 0
        self._pool = ThreadPoolExecutor(
            options.workers, "kvfetch-encode", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._stop = threading.Event()
        # Segments that need no work, by the manifest's name: the manifest, and the names of its data.
        self._known: dict[str, tuple[ObjectInfo, frozenset[str]]] = {}
        self._failed: dict[str, ObjectInfo] = {}  # manifests of segments that can never be encoded, by name
        self._encoded: set[str] = set()  # manifests that this encoder replaced since the last listing

    async def run_once(self) -> None:
        """Encode all stored segments. After the grace period, delete the data that this left without a manifest.

        Raises StoreError if the store cannot be used.
        """
        for _ in range(_MAX_ROUNDS):
            before = self.tally.num_changed
            await self.run_round()
            if self.tally.num_changed == before:
                break
        if self.garbage.due_in_s:
            logger.warning(
                "waiting up to %g s before %d replaced data objects are deleted, since readers may still use them "
                "(--grace); Ctrl-C leaves them to the next run",
                self._options.grace_s,
                len(self.garbage),
            )
        while (due_in_s := self.garbage.due_in_s) is not None:
            await asyncio.sleep(due_in_s)
            if not await self._delete_due():
                break  # the next run deletes the rest

    async def watch(self, poll_interval_s: float) -> None:
        """Encode new segments until cancelled. Retry after a StoreError; raise it if that cannot help."""
        while True:
            try:
                await self.run_round()
            except StoreError as e:
                if e.reason in ("unauthorised", "invalid"):
                    raise
                logger.warning("encoding round failed, retry in %g s: %s", poll_interval_s, e)
            await asyncio.sleep(poll_interval_s)

    async def run_round(self) -> None:
        """List all segments and encode those that need it. Raises StoreError if the store cannot be used."""
        await self._store.require_replace()
        collecting = asyncio.create_task(self._collect())
        try:
            logger.info("list %s", self._options.prefix)
            segments = await list_segments(self._objects, self._options.prefix)
            present = {s.key.manifest_name for s in segments if s.manifest is not None}
            for kept in (self._known, self._failed):
                for name in kept.keys() - present:
                    del kept[name]
            work: list[ObjectInfo] = []
            await side_by_side(_MANIFEST_READS, segments, partial(self._look, work))
            if work:
                self._num_wanted += len(work)
                self._on_progress(self._num_finished, self._num_wanted)
                await side_by_side(self._options.workers, work, self._work)
            await self._delete_due()
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    async def close(self) -> None:
        """Abort unfinished work. Does not close the store."""
        self._stop.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    # Find work.

    async def _look(self, work: list[ObjectInfo], stored: StoredSegment) -> None:
        """Find out whether a segment needs work, and which of its data objects its manifest does not name."""
        if stored.manifest is None:
            return
        try:
            known = await self._know(work, stored.manifest)
        except KVFetchError as e:
            if not e.concerns_object:
                raise
            self._fail(stored.manifest, e)
            return
        if known is not None:
            self.garbage.record_named(known)
            self.garbage.record_unnamed(stored.data.keys() - known)

    async def _know(self, work: list[ObjectInfo], info: ObjectInfo) -> frozenset[str] | None:
        """Read a manifest if it has changed, and return the names of its data. None if it is gone or failed before.
        Raises FormatError, StoreError."""
        name = info.name
        known = self._known.pop(name, None)
        if known is not None and known[0] == info:
            self._known[name] = known
            return known[1]
        if self._failed.get(name) == info:
            return None
        content = await self._store.get(name)
        if content is None:
            return None
        manifest = self._decode(name, content)
        if is_done(manifest, self._options.targets, self._options.keep_source):
            self._known[name] = info, manifest.data_names
            self.tally.num_done += name not in self._encoded
            self._encoded.discard(name)
        else:
            work.append(info)
        return manifest.data_names

    def _decode(self, name: str, content: bytes) -> Manifest:
        """Decode a manifest. Raises FormatError, also if it belongs under another name, or needs a key."""
        manifest = decode_named_manifest(content, name)
        require_rewritable(content)
        if not self._store.keys:
            manifest.require_open()
        return manifest

    # Encoding.

    async def _work(self, info: ObjectInfo) -> None:
        """Encode one segment. Note its failure, unless the store itself fails, which is raised."""
        name, content = info.name, None
        try:
            logger.info("read %s", name)
            content = await self._store.get(name)
            if content is None:
                raise _Changed
            await self._encode(name, content, self._decode(name, content))
        except _Changed:
            self._record_change(name)
        except KVFetchError as e:
            if not e.concerns_object:
                raise
            if content is not None and await self._store.get(name) != content:
                self._record_change(name)
            else:
                self._fail(info, e)
        except Exception as e:
            logger.exception("cannot encode %s", name)
            self.tally.failures[name] = repr(e)
        finally:
            self._num_finished += 1
            self._on_progress(self._num_finished, self._num_wanted)

    def _record_change(self, name: str) -> None:
        self.tally.num_changed += 1
        logger.info("%s was replaced or deleted by another process", name)

    async def _encode(self, name: str, content: bytes, manifest: Manifest) -> None:
        """Add the missing variants to a segment, and replace its manifest. What is not named then becomes garbage."""
        options = self._options
        if is_done(manifest, options.targets, options.keep_source):
            return  # another encoder was faster
        missing = [target for target in options.targets if find_variant(manifest, target) is None]
        made = await self._make(name, manifest, missing) if missing else None
        whole = msgspec.structs.replace(
            manifest, variants=with_variants(manifest, options.targets, made, options.keep_source)
        )
        try:
            await self._check(whole)
            new = whole.encode()
            logger.info("replace %s", name)
            if not await self._store.replace(name, new, object_digest(content)):
                raise _Changed
        except BaseException:
            self.garbage.record_unnamed(whole.data_names - manifest.data_names)
            raise
        logger.info("replaced %s", name)
        self.garbage.record_unnamed(manifest.data_names - whole.data_names)
        self._encoded.add(name)
        tally = self.tally
        tally.failures.pop(name, None)
        tally.num_encoded += 1
        tally.raw_bytes += manifest.raw_bytes
        tally.before_bytes += len(content) + _data_bytes(manifest)
        tally.after_bytes += len(new) + _data_bytes(whole)

    async def _make(self, name: str, manifest: Manifest, missing: Sequence[Target]) -> Manifest:
        """Encode and put the missing variants. Return a manifest that lists only them."""
        keys = self._store.keys
        opened = await self._run(partial(open_manifest, manifest, keys))
        source = cheapest_variant(opened)
        data, *levels = await self._objects_of(manifest, manifest.variants[source])
        logger.info("encode %s", name)
        coded = await self._run(
            partial(transcode, opened, data, missing, source, levels=levels, before_cell=self._before_cell)
        )
        coded = await self._run(partial(secure_segment, coded, keys))
        for data_name, new in coded.data_objects():
            logger.info("put %s", data_name)
            # Put it even if it exists: its new age protects it from collection until a manifest names it.
            await self._store.put(data_name, new)
        return coded.manifest

    async def _check(self, whole: Manifest) -> None:
        """Read the wanted variants back and decode all of them, since the others may be deleted afterwards. Raises
        CorruptError if one does not decode to the same values."""
        checked: set[str] = set()
        opened = await self._run(partial(open_manifest, whole, self._store.keys))
        for index, variant in enumerate(whole.variants[: len(self._options.targets)]):
            name = whole.data_name(variant)
            if name in checked:
                continue
            checked.add(name)
            logger.info("check %s", name)
            data, *levels = await self._objects_of(whole, variant)
            await self._run(partial(verify_variant, opened, index, data, levels=levels, before_cell=self._before_cell))
        require_same_content(opened)

    async def _objects_of(self, manifest: Manifest, variant: Variant) -> list[bytes]:
        """Return the contents of a variant's data object and of its levels'. Raises StoreError."""
        objects = []
        for each in variant.objects:
            data = await self._store.get(manifest.data_name(each), 0, each.size_bytes)
            if data is None:
                raise StoreError("missing", f"{manifest.data_name(each)} is gone")
            objects.append(data)
        return objects

    async def _run(self, compute: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, compute)

    def _before_cell(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _fail(self, manifest: ObjectInfo, error: KVFetchError) -> None:
        if isinstance(error, FormatError):
            self._failed[manifest.name] = manifest  # a retry cannot help
        logger.warning("cannot encode %s: %s", manifest.name, error)
        self.tally.failures[manifest.name] = str(error)

    # Delete.

    async def _collect(self) -> None:
        """Delete due data during a round, which may take hours."""
        while True:
            await asyncio.sleep(min(1.0, self._options.grace_s) or 1.0)
            await self._delete_due()

    async def _delete_due(self) -> bool:
        """Delete due data. Return False if that failed."""
        try:
            await self.garbage.delete_due(self._deleted)
        except StoreError as e:
            logger.warning("cannot delete unneeded data: %s", e)
            return False
        return True

    def _deleted(self, name: str, num_bytes: int) -> None:
        logger.info("delete %s", name)
        self.tally.num_deleted += 1
        self.tally.deleted_bytes += num_bytes


def _data_bytes(manifest: Manifest) -> int:
    return sum(manifest.data_sizes.values())


class Garbage:
    """Deletes data ``grace_s`` after this process learnt that the manifest of their segment does not name them.

    By then, readers of an older manifest are done. The grace period uses this process's clock, not the store's. Two
    kinds of data are left to the store. Data without any manifest: a writer may be about to put one. Data younger than
    the manifest: another encoder put it, and may read it back for longer than the grace period before it puts a
    manifest that names it.
    """

    def __init__(self, store: AdminStore, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._grace_s = grace_s
        self._clock = clock
        self._unnamed: dict[str, float] = {}  # when this process saw that no manifest names it

    def __len__(self) -> int:
        return len(self._unnamed)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next object may be deleted; None if there is none."""
        if not self._unnamed:
            return None
        return max(0.0, min(self._unnamed.values()) + self._grace_s - self._clock())

    def record_unnamed(self, names: Iterable[str]) -> None:
        """Record that no manifest names these data objects."""
        for name in names:
            self._unnamed.setdefault(name, self._clock())

    def record_named(self, names: Iterable[str]) -> None:
        """Record that manifests name these data objects."""
        for name in names:
            self._unnamed.pop(name, None)

    async def delete_due(self, on_delete: Callable[[str, int], None] = lambda name, num_bytes: None) -> None:
        """Delete objects that no manifest has named for ``grace_s``. ``on_delete`` gets each name and size in bytes.

        Raises the first StoreError. The object that failed waits for another grace period; the others stay due.
        """
        limit = self._clock() - self._grace_s
        for name in [name for name, since_s in self._unnamed.items() if since_s <= limit]:
            try:
                await self._delete(name, on_delete)
            except StoreError:
                self._unnamed[name] = self._clock()
                raise

    async def _delete(self, name: str, on_delete: Callable[[str, int], None]) -> None:
        manifest = await self._store.head(parse_object_name(name).segment.manifest_name)
        info = await self._store.head(name)
        if manifest is not None and info is not None and info.modified_s <= manifest.modified_s:
            with contextlib.suppress(FormatError):  # perhaps a newer version wrote the manifest
                if await self._store.delete_unnamed(name):
                    on_delete(name, info.size_bytes)
        self._unnamed.pop(name, None)
