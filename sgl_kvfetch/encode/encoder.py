"""Bring the segments of a store into the wanted variants, beside readers, writers and other encoders.

Each segment in this order, so that dying anywhere loses nothing: put the new data, read it back and decode all of it,
replace the manifest if it is still the one that was read, and only when the grace period is over delete what it did
without. Nothing is remembered on disk: the store itself says what is left to do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import msgspec
import torch
import xxhash

from sgl_kvfetch.codecs.base import FrameEncoder
from sgl_kvfetch.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.encode.garbage import Garbage
from sgl_kvfetch.encode.targets import Target, find_variant, is_done, with_variants
from sgl_kvfetch.encode.transcode import cheapest_variant, require_same_content, transcode, verify_variant
from sgl_kvfetch.errors import CorruptError, EncodeError, FormatError, KVFetchError, StoreError, StoreErrorReason
from sgl_kvfetch.stores.base import ObjectInfo, Store, object_digest
from sgl_kvfetch.stores.listing import StoredSegment, list_segments

logger = logging.getLogger(__name__)
T = TypeVar("T")

_Stamp = tuple[float, int]  # of a manifest: when it was put, and its size
Step = Literal["list", "read", "encode", "put", "check", "replace", "replaced", "delete"]

# Failures that say something about one object, not about the store.
_OBJECT_REASONS: frozenset[StoreErrorReason] = frozenset(
    {"truncated", "io", "invalid", "too_large", "full", "protocol", "missing"}
)
_MANIFEST_READS = 16  # at once
_MAX_ROUNDS = 3  # for segments that change while they are encoded


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    targets: tuple[Target, ...]
    prefix: str = ""  # of objects' names
    keep_source: bool = False  # keep what is not wanted as further variants
    grace_s: float = 60.0  # how long data stay that manifests do without
    workers: int = 1  # segments at once, each on a thread and in memory

    def __post_init__(self) -> None:
        assert self.targets
        assert self.workers >= 1
        assert self.grace_s >= 0


@dataclass(slots=True)
class Tally:
    """What was done. Bytes are those of the segments that were encoded: in the pool, and as stored before and after."""

    num_done: int = 0  # segments that had the wanted variants already
    num_encoded: int = 0
    num_changed: int = 0  # that were deleted or replaced meanwhile, by someone else
    raw_bytes: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    num_deleted: int = 0  # data objects that no manifest named any more
    deleted_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # what is wrong, by manifest's name


@dataclass(frozen=True, slots=True)
class _Work:
    name: str  # of the manifest
    stamp: _Stamp
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: _Stamp
    data_names: frozenset[str]


class _Changed(Exception):
    """The segment was deleted or replaced by someone else."""


class _Stopped(Exception):
    """We are to end, and nobody waits for the result."""


class Encoder:
    """Encodes the segments of one store. Belongs to one event loop.

    ``on_step`` is told what is about to be done to which object, ``on_total`` how many segments and raw bytes a round
    has to encode, ``on_segment`` of each that is through, encoded or not. ``encoders``: of codecs that are encoded
    elsewhere than on the CPU.
    """

    def __init__(
        self,
        store: Store,
        options: EncodeOptions,
        *,
        encoders: Mapping[str, FrameEncoder] | None = None,
        on_step: Callable[[Step, str], None] = lambda step, name: None,
        on_total: Callable[[int, int], None] = lambda segments, raw_bytes: None,
        on_segment: Callable[[int], None] = lambda raw_bytes: None,
    ) -> None:
        self.tally = Tally()
        self.garbage = Garbage(store, options.grace_s)
        self._store = store
        self._options = options
        self._encoders = encoders or {}
        self._on_step = on_step
        self._on_total = on_total
        self._on_segment = on_segment
        self._pool = ThreadPoolExecutor(
            options.workers, "kvfetch-encode", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._stop = threading.Event()
        self._known: dict[str, _Known] = {}  # segments that need nothing, by manifest's name
        self._failed: dict[str, _Stamp] = {}  # manifests with whose segment nothing can be done
        self._encoded: set[str] = set()  # manifests that were replaced since the last listing

    async def run_once(self) -> None:
        """Encode all that is there, and delete what that leaves over once the grace period is past.

        Raises StoreError if the store cannot be read.
        """
        for _ in range(_MAX_ROUNDS):
            before = self.tally.num_changed
            await self.run_round()
            if self.tally.num_changed == before:
                break
        while (due_in_s := self.garbage.due_in_s) is not None:
            await asyncio.sleep(due_in_s)
            if not await self._delete_due():
                break  # the next run finds it

    async def watch(self, poll_interval_s: float) -> None:
        """Encode what comes, until cancelled. A store that cannot be reached is tried again; what it refuses for good
        raises StoreError."""
        while True:
            try:
                await self.run_round()
            except StoreError as e:
                if e.reason == "unauthorised":
                    raise
                logger.warning("trying again in %g s: %s", poll_interval_s, e)
            await asyncio.sleep(poll_interval_s)

    async def run_round(self) -> None:
        """List, and encode what is not in the wanted variants. Raises StoreError if the store cannot be read."""
        collecting = asyncio.create_task(self._collect())
        try:
            self._on_step("list", self._options.prefix)
            segments = await list_segments(self._store, self._options.prefix)
            present = {s.key.manifest_name for s in segments if s.manifest is not None}
            for kept in (self._known, self._failed):
                for name in kept.keys() - present:
                    del kept[name]
            work: list[_Work] = []
            await _side_by_side(_MANIFEST_READS, segments, partial(self._look, work))
            if work:
                self._on_total(len(work), sum(w.raw_bytes for w in work))
                await _side_by_side(self._options.workers, work, self._work)
            await self._delete_due()
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    async def close(self) -> None:
        """Give up what is in work. The store is the caller's."""
        self._stop.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    # Looking.

    async def _look(self, work: list[_Work], stored: StoredSegment) -> None:
        """Find out whether a segment needs work, and which of its data nobody needs."""
        if stored.manifest is None:
            return
        try:
            known = await self._know(work, stored.manifest)
        except KVFetchError as e:
            _require_of_object(e)
            self._fail(stored.manifest.name, _stamp(stored.manifest), e)
            return
        if known is not None:
            self.garbage.in_use(known.data_names)
            for data_name in stored.data.keys() - known.data_names:
                self.garbage.found(data_name, stored.data[data_name].modified_s)

    async def _know(self, work: list[_Work], info: ObjectInfo) -> _Known | None:
        """What a manifest says; None for one that is gone, or has failed. Raises FormatError, StoreError."""
        name, stamp = info.name, _stamp(info)
        known = self._known.get(name)
        if known is not None and known.stamp == stamp:
            return known
        self._known.pop(name, None)
        if self._failed.get(name) == stamp:
            return None
        content = await self._store.get(name)
        if content is None:
            return None
        manifest = _decode(name, content)
        known = _Known(stamp, manifest.data_names)
        if is_done(manifest, self._options.targets, self._options.keep_source):
            self._known[name] = known
            self.tally.num_done += name not in self._encoded
            self._encoded.discard(name)
        else:
            work.append(_Work(name, stamp, manifest.raw_bytes))
        return known

    # Encoding.

    async def _work(self, work: _Work) -> None:
        content: bytes | None = None
        try:
            self._on_step("read", work.name)
            content = await self._store.get(work.name)
            if content is None:
                raise _Changed
            await self._encode(work.name, content, _decode(work.name, content))
        except _Changed:
            self._note_change(work.name)
        except KVFetchError as e:
            _require_of_object(e)
            if content is not None and await self._store.get(work.name) != content:
                self._note_change(work.name)
            else:
                self._fail(work.name, work.stamp, e)
        except Exception as e:
            logger.exception("%s not encoded", work.name)
            self.tally.failures[work.name] = repr(e)
        finally:
            self._on_segment(work.raw_bytes)

    def _note_change(self, name: str) -> None:
        self.tally.num_changed += 1
        logger.info("%s was replaced or deleted meanwhile", name)

    async def _encode(self, name: str, content: bytes, manifest: Manifest) -> None:
        options = self._options
        if is_done(manifest, options.targets, options.keep_source):
            return  # by another encoder, since we looked
        missing = [target for target in options.targets if find_variant(manifest, target) is None]
        made = await self._make(name, manifest, missing) if missing else None
        whole = msgspec.structs.replace(
            manifest, variants=with_variants(manifest, options.targets, made, options.keep_source)
        )
        try:
            await self._check(whole, made)
            new = whole.encode()
            self._on_step("replace", name)
            if not await self._store.replace(name, new, object_digest(content)):
                raise _Changed
        except BaseException:
            for data_name in whole.data_names - manifest.data_names:
                self.garbage.found(data_name, None)
            raise
        self._on_step("replaced", name)
        for data_name in manifest.data_names - whole.data_names:
            self.garbage.found(data_name, None)
        self._encoded.add(name)
        tally = self.tally
        tally.failures.pop(name, None)
        tally.num_encoded += 1
        tally.raw_bytes += manifest.raw_bytes
        tally.before_bytes += len(content) + _data_bytes(manifest)
        tally.after_bytes += len(new) + _data_bytes(whole)

    async def _make(self, name: str, manifest: Manifest, missing: Sequence[Target]) -> Manifest:
        """Code and put the missing variants. A manifest of theirs."""
        source = cheapest_variant(manifest)
        variant = manifest.variants[source]
        data = await self._store.get(manifest.data_name(variant), 0, manifest.data_bytes(variant))
        if data is None:
            raise StoreError("missing", f"{manifest.data_name(variant)} is gone")
        self._on_step("encode", name)
        coded = await self._run(
            partial(transcode, manifest, data, missing, source, before_cell=self._before_cell, encoders=self._encoders)
        )
        for data_name, new in coded.data_objects():
            self._on_step("put", data_name)
            # Even if it is there: that makes it young, so that nobody takes it for garbage before it is named.
            await self._store.put(data_name, new)
        return coded.manifest

    async def _check(self, whole: Manifest, made: Manifest | None) -> None:
        """Read the wanted variants back and decode all of them: others may be deleted once these are the segment.
        Raises EncodeError if it is to be tried again, on the CPU."""
        checked: set[str] = set()
        for index, variant in enumerate(whole.variants[: len(self._options.targets)]):
            name = whole.data_name(variant)
            if name in checked:
                continue
            checked.add(name)
            self._on_step("check", name)
            data = await self._store.get(name, 0, whole.data_bytes(variant))
            if data is None:
                raise StoreError("missing", f"{name} is gone")
            try:
                await self._run(partial(verify_variant, whole, index, data, before_cell=self._before_cell))
            except CorruptError as e:
                is_ours = made is not None and variant in made.variants
                is_what_was_put = xxhash.xxh3_128_hexdigest(data) == variant.data_digest
                if not (self._encoders and is_ours and is_what_was_put):
                    raise
                for encoder in self._encoders.values():
                    encoder.distrust(f"{name}: {e}")
                raise EncodeError(f"{name} decodes to something else: {e}") from e
        require_same_content(whole)

    async def _run(self, compute: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, compute)

    def _before_cell(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _fail(self, name: str, stamp: _Stamp, error: KVFetchError) -> None:
        if isinstance(error, FormatError):
            self._failed[name] = stamp  # it will not get better
        logger.warning("%s not encoded: %s", name, error)
        self.tally.failures[name] = str(error)

    # Deleting.

    async def _collect(self) -> None:
        """Delete what is due while a round goes on, which may take hours."""
        while True:
            await asyncio.sleep(min(1.0, self._options.grace_s) or 1.0)
            await self._delete_due()

    async def _delete_due(self) -> bool:
        """Whether all that is due could be deleted."""
        try:
            await self.garbage.delete_due(self._deleted)
        except StoreError as e:
            logger.warning("not deleted yet: %s", e)
            return False
        return True

    def _deleted(self, name: str, num_bytes: int) -> None:
        self._on_step("delete", name)
        self.tally.num_deleted += 1
        self.tally.deleted_bytes += num_bytes


async def _side_by_side(count: int, items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """``count`` items at a time. Raises the first error, and gives up the rest then."""
    left = iter(items)

    async def take() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(take())
    except ExceptionGroup as e:
        raise e.exceptions[0] from None


def _require_of_object(error: KVFetchError) -> None:
    """Raises the error if it says something about the store, not about one object."""
    if isinstance(error, StoreError) and error.reason not in _OBJECT_REASONS:
        raise error


def _stamp(info: ObjectInfo) -> _Stamp:
    return info.modified_s, info.size_bytes


def _decode(name: str, content: bytes) -> Manifest:
    """Raises FormatError, also for a manifest that belongs under another name."""
    manifest = decode_manifest(content)
    if manifest.key.manifest_name != name:
        raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
    return manifest


def _data_bytes(manifest: Manifest) -> int:
    return sum({manifest.data_name(v): manifest.data_bytes(v) for v in manifest.variants}.values())
