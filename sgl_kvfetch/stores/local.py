"""A store in a directory, for one machine or a shared file system."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.base import Lookup, ObjectInfo, Store
from sgl_kvfetch.stores.directory import Directory
from sgl_kvfetch.stores.files import OpenObject
from sgl_kvfetch.stores.scanning import Scan
from sgl_kvfetch.stores.writing import DataWriter, IncompleteSegmentError, write_manifest

__all__ = ["IncompleteSegmentError", "LocalStore", "StoreUsage", "Upload"]

P = ParamSpec("P")
T = TypeVar("T")

# How long a lookup waits for a scan. It does not wait if the last scan of the namespace was long.
SCAN_WAIT_S = 1.0
_LOOKUP_THREADS = 2
_DELETE_TURN_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreUsage:
    stored_bytes: int
    num_segments: int  # those that lookups can find
    num_evicted: int  # segments, since the start
    num_collected: int  # orphaned objects and temporary files, since the start
    num_unreadable: int  # skipped manifests, since the start


class LocalStore(Store):
    """A directory of objects. Other processes may use it at the same time; each object is replaced atomically.

    With a capacity, the least recently used segments are evicted for new ones: manifest first, then data. Unfinished
    writes of dead writers are removed once they are ``orphan_age_s`` old.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        capacity_bytes: int | None = None,
        orphan_age_s: float = 900.0,
        num_threads: int = 8,
    ) -> None:
        """The first write creates the directory. Raises ConfigError for a capacity below one byte."""
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes is {capacity_bytes}; expected at least 1, or none for no limit")
        self.root = Path(root)
        self._directory = Directory(self.root, capacity_bytes, orphan_age_s)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="kvfetch-local")
        # Lookups have their own threads: the others may all be waiting for the disk.
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="kvfetch-lookup")
        self._closed = False

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        assert start >= 0
        assert length is None or length >= 0
        files.require_name(name)
        return await self._run(self._get, name, start, length)

    def _get(self, name: str, start: int, length: int | None) -> bytes | None:
        opened = self._open(name)
        if opened is None:
            return None
        with opened.file as file, files.os_errors(f"reading {name}"):
            wanted = opened.info.size_bytes - start if length is None else length
            data = files.read_fully(file, start, wanted) if wanted >= 0 else b""
        if wanted < 0 or start > opened.info.size_bytes or len(data) < wanted:
            raise StoreError(
                "truncated",
                f"{name} has {opened.info.size_bytes} bytes; expected length {length} from byte {start}",
            )
        return data

    async def put(self, name: str, data: bytes) -> None:
        """Raises StoreError: ``invalid`` if data does not match its name's digest, or a manifest's data is missing."""
        parsed = files.require_name(name)
        if parsed.is_manifest:
            await self._run(write_manifest, self._directory, name, data)
        else:
            await self._run(self._put_data, DataWriter(self._directory, parsed), data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Atomic across processes if the file system supports locks. Raises as ``put`` does."""
        if not files.require_name(name).is_manifest:
            raise StoreError("invalid", f"{name} is not a manifest; data objects are never replaced")
        return await self._run(write_manifest, self._directory, name, data, expected_digest)

    def _put_data(self, writer: DataWriter, data: bytes) -> None:
        try:
            writer.write(data)
            writer.commit()
        finally:
            writer.discard()

    def upload(self, name: str) -> Upload:
        """Begin to write a data object in pieces. Raises StoreError (``invalid``) for any other name."""
        parsed = files.require_name(name)
        if parsed.is_manifest:
            raise StoreError("invalid", f"{name} is a manifest; only data objects are written in pieces")
        return Upload(self, DataWriter(self._directory, parsed))

    async def open_object(self, name: str) -> OpenObject | None:
        """Open an object for reading in pieces; the caller closes it. None if it is missing."""
        files.require_name(name)
        opening = asyncio.ensure_future(self._run(self._open, name))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise

    def _open(self, name: str) -> OpenObject | None:
        with files.os_errors(f"opening {name}"):
            opened = files.open_object(self.root, name)
        if opened is not None:
            # No lock, so that scans do not delay reads: touch only looks up one entry and sets its times.
            self._directory.catalog.touch((files.require_name(name).segment.manifest_name,))
        return opened

    async def head(self, name: str) -> ObjectInfo | None:
        files.require_name(name)
        return await self._run(self._head, name)

    def _head(self, name: str) -> ObjectInfo | None:
        with files.os_errors(f"looking at {name}"):
            return files.stat_object(self.root, name)

    async def delete(self, name: str) -> bool:
        """Delete an object. If its segment needs it, lookups no longer find the segment."""
        files.require_name(name)
        return await self._run(self._delete, name)

    def _delete(self, name: str) -> bool:
        with self._directory.lock, files.os_errors(f"deleting {name}"):
            return self._directory.capacity.delete(name)

    async def delete_prefix(self, prefix: str) -> int:
        count, more = 0, True
        while more:
            some, more = await self.delete_some(prefix, _DELETE_TURN_S)
            count += some
        return count

    async def delete_some(self, prefix: str, within_s: float) -> tuple[int, bool]:
        """Like ``delete_prefix``, for about ``within_s``. Return how many were deleted, and if some may be left."""
        return await self._run(self._delete_some, prefix, time.monotonic() + within_s)

    def _delete_some(self, prefix: str, until: float) -> tuple[int, bool]:
        with files.os_errors(f"deleting {prefix}*"):
            return self._directory.delete_some(prefix, until)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for namespace in await self._run(self._namespaces):
            if namespace.startswith(prefix[: len(namespace)]):
                for info in await self._run(self._list, namespace, prefix):
                    yield info

    def _namespaces(self) -> Sequence[str]:
        with files.os_errors("listing namespaces"):
            return files.namespaces(self.root)

    def _list(self, namespace: str, prefix: str) -> Sequence[ObjectInfo]:
        with files.os_errors(f"listing {namespace}"):
            return files.list_objects(self.root, namespace, prefix)

    async def warm_up(self) -> int:
        """Read all manifests, so that the first lookups do not wait for that. Return the number of segments."""
        return (await self.usage()).num_segments

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """During a long scan, the answer may lack recent changes by other processes.

        Segments that were put through this store are always found.
        """
        files.require_namespace(namespace)
        found = await self._run_in(self._lookups, self._lookup_or_scan, namespace, page_hashes)
        if isinstance(found, Lookup):
            return found
        # gather and wait_for would cancel the scan, which other lookups wait for too.
        done, _ = await asyncio.wait({asyncio.wrap_future(found.future)}, timeout=SCAN_WAIT_S)
        for scan in done:
            error = scan.result()
            if error is not None:
                raise error
        return await self._run_in(self._lookups, self._lookup, namespace, page_hashes)

    def _lookup_or_scan(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup | Scan:
        with files.os_errors(f"looking up in {namespace}"):
            scan = self._directory.scanner.start(namespace)
        return self._lookup(namespace, page_hashes) if scan is None or scan.is_long else scan

    def _lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        with self._directory.lock:
            found = self._directory.catalog.index.find(namespace, page_hashes)
            self._directory.catalog.touch(name for name, _ in found)
        return Lookup(tuple(hit for _, hit in found))

    async def usage(self) -> StoreUsage:
        """Return sizes and counters. The first call reads every manifest, later ones what other processes changed."""
        scans = await self._run(self._start_scans)
        if scans:
            done, _ = await asyncio.wait({asyncio.wrap_future(scan.future) for scan in scans})
            self._directory.scanner.finish_all([scan.result() for scan in done])
        else:
            self._directory.scanner.finish_all([])
        return await self._run(self._usage)

    def _start_scans(self) -> Sequence[Scan]:
        with files.os_errors("scanning"):
            return self._directory.scanner.start_all()

    def _usage(self) -> StoreUsage:
        directory = self._directory
        with directory.lock:
            return StoreUsage(
                directory.catalog.stored_bytes,
                len(directory.catalog.index),
                directory.capacity.num_evicted,
                directory.num_collected,
                directory.catalog.num_unreadable,
            )

    async def collect(self) -> None:
        """Remove old orphans now. Writes also do this, at most once every ``orphan_age_s``."""
        await self._run(self._collect)

    def _collect(self) -> None:
        with files.os_errors("collecting orphans"):
            self._directory.collect()

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._directory.scanner.stop()
        self._lookups.shutdown()
        self._executor.shutdown()

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run_in(self._executor, call, *args, **kwargs)

    async def _run_in(self, threads: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise StoreError("io", f"the store {self.root} is closed")
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: call(*args, **kwargs))


class Upload:
    """A data object that is written in pieces. Leaving the context without ``commit`` discards it."""

    def __init__(self, store: LocalStore, writer: DataWriter) -> None:
        self._store = store
        self._writer = writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self._writer.discard))  # works after the store is closed

    async def write(self, data: bytes) -> None:
        """Append ``data``. Raises StoreError (``full``, ``io``)."""
        await self._store._run(self._writer.write, data)

    async def commit(self) -> None:
        """Make the object visible. Raises StoreError (``invalid`` if the digest does not match; ``full``, ``io``)."""
        await self._store._run(self._writer.commit)


def _close_opened(opening: asyncio.Future[OpenObject | None]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opened = opening.result()
        if opened is not None:
            opened.file.close()
