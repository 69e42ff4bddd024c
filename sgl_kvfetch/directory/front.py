"""A store in a directory, in front of another store: `kvfetch serve --upstream`.

The upstream is the authority, and the directory is what lies near: beside the engines of one node, or in one rack.

* **Lookups** are answered from the directory as far as it reaches. The rest of the pages is looked up in the upstream.
* **Data** that the directory lacks is passed on as it comes from the upstream: a reader waits for its own range and
  nothing else. Behind it, its whole segment is kept (`keeper`), by the directory's own rules: capacity, least recently
  used first, expiry, pins.
* **Writes** go to both. Data is kept in the directory first, because that checks it, and then sent on. A manifest goes
  to the upstream first. So what lookups find here is, or was, in the upstream; a write that the upstream refuses or
  does not get fails; and whatever dies at whatever moment, the upstream has lost nothing.
* **Deletions** go to both, to the upstream first: nothing that is deleted here is kept from there again.
* **While the upstream fails**, lookups are answered with what the directory has, and writes fail.

A manifest by its name is the upstream's while it answers: whoever replaces a manifest must know the one that everybody
has. Profiles are the upstream's, and copied. Pins and the list of objects are the directory's own.

Nothing that comes from the upstream is trusted: readers verify each chunk, and the directory takes data only if it has
the digest in its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sgl_kvfetch.codec import Content, bytes_of
from sgl_kvfetch.codec.container.objects import Pieces
from sgl_kvfetch.directory import files
from sgl_kvfetch.directory.files import OpenObject
from sgl_kvfetch.directory.keeper import Disk, Keeper
from sgl_kvfetch.directory.local import LocalStore, StoreUsage
from sgl_kvfetch.directory.writing import Upload
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import PROFILES, AdminStore, Breaker, Lookup, NoteKind, ObjectInfo, SegmentHit, require_name
from sgl_kvfetch.stores.wire import MAX_LOOKUP_ANSWER_BYTES

_LOOKUP_S = 1.0  # clients wait for 2 s by default
_PASSED_AT_ONCE = 4 << 20  # bytes of a range, which are in memory until the reader has them
_HIT_BYTES = 512  # at least what one hit takes beside its manifest
_NO_DIGEST = "0" * 32  # of no namespace
_VERDICTS = frozenset({"invalid", "too_large", "full", "truncated", "missing"})  # of a store that works

_NO_ANSWER: Any = object()  # unlike None, which says that there is nothing

Operation = Literal["lookup", "read", "write", "delete", "keep"]
OnFailure = Callable[[Operation, StoreError], None]


class FrontStore(LocalStore):
    """Belongs to one event loop. ``close`` closes the upstream, too."""

    def __init__(
        self,
        root: Path | str,
        upstream: AdminStore,
        on_failure: OnFailure = lambda operation, error: None,
        **options: Any,
    ) -> None:
        """``on_failure`` is called with each failure of the upstream, also where an answer hides it, and of what keeps
        its segments. ``options`` are for `LocalStore`."""
        super().__init__(root, **options)
        self.upstream = upstream
        self._on_failure = on_failure
        self._health = Breaker()
        self._problem: str | None = "the upstream has not answered yet"  # None once it has, until it fails
        self.passed_bytes = 0  # to readers, from the upstream
        disk = Disk(super().head, self.upload_parts, super().put)
        self._keeper = Keeper(upstream, disk, lambda error: on_failure("keep", error))

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes have been fetched behind readers."""
        return self._keeper.behind_bytes

    @contextmanager
    def _asking(self, operation: Operation) -> Iterator[None]:
        """Record whether the upstream works."""
        try:
            yield
        except StoreError as e:
            self._on_failure(operation, e)
            if e.reason not in _VERDICTS:
                self._problem = f"the upstream fails: {e}"
                self._health.failed(time.monotonic())
            raise
        self._problem = None
        self._health.succeeded()

    async def _ask(self, operation: Operation, call: Callable[[], Awaitable[Any]], otherwise: Any) -> Any:
        """Return what the upstream answers; ``otherwise`` if it fails, takes longer than `_LOOKUP_S`, or has failed
        again and again."""
        if self._health.is_open(time.monotonic()):
            return otherwise
        try:
            with self._asking(operation):
                try:
                    async with asyncio.timeout(_LOOKUP_S):
                        return await call()
                except TimeoutError as e:
                    raise StoreError("timeout", f"no answer within {_LOOKUP_S:g} s", retriable=True) from e
        except StoreError:
            return otherwise

    # Reading

    async def lookup_taking(self, namespace: str, page_hashes: Sequence[bytes], take: Callable[[int], None]) -> Lookup:
        found = await super().lookup_taking(namespace, page_hashes, take)
        left = page_hashes[found.num_pages :]
        if not left:
            return found
        more: Lookup = await self._ask("lookup", lambda: self.upstream.lookup(namespace, left), Lookup(()))
        hits, room = list(found.hits), MAX_LOOKUP_ANSWER_BYTES - sum(map(_size_of, found.hits))
        for hit in more.hits:
            if (room := room - _size_of(hit)) < 0:
                break
            take(len(hit.manifest))
            hits.append(hit)
        return Lookup(tuple(hits))

    async def folders(self, digest: str = "") -> frozenset[str]:
        found: frozenset[str] = await self._ask("lookup", lambda: self.upstream.folders(digest), frozenset())
        return await super().folders(digest) | found

    async def pass_on(self, name: str, start: int, length: int, send: Callable[[memoryview], Awaitable[None]]) -> bool:
        """Send bytes of a data object that the directory lacks, as they come. Return False if the upstream lacks it.

        Raises StoreError, and what ``send`` raises.
        """
        first, end = start, start + length
        with self._keeper.reading(name):
            while start < end:
                num_bytes = min(_PASSED_AT_ONCE, end - start)
                kept = await self._keeper.read(name, start, num_bytes)
                if kept is not None:
                    await send(memoryview(kept))
                elif not await self._pass_on(name, start, memoryview(bytearray(num_bytes)), send):
                    if start > first:
                        raise StoreError("missing", f"{name} was deleted while it was read")
                    return False
                start += num_bytes
        return True

    async def _pass_on(
        self, name: str, start: int, into: memoryview, send: Callable[[memoryview], Awaitable[None]]
    ) -> bool:
        """Fill ``into`` from the upstream, and send what has come meanwhile. What comes is kept, also of a read that
        breaks off. Return False if the upstream lacks the object."""
        come = sent = 0
        more = asyncio.Event()

        def received(num_bytes: int) -> None:
            nonlocal come
            come += num_bytes
            more.set()

        with self._asking("read"):
            reading = asyncio.ensure_future(self.upstream.read(name, start, [into], received))
            reading.add_done_callback(lambda _: more.set())
            try:
                while sent < come or not reading.done():
                    if sent == come:
                        more.clear()
                        await more.wait()
                    else:
                        piece = into[sent:come]
                        sent = come
                        await send(piece)
                return await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
                self.passed_bytes += come
                self._keeper.add(name, start, into[:come])

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if require_name(name).is_manifest and length is None:
            return await self.get_manifest(name)
        found = await super().get(name, start, length)
        if found is None:
            with self._asking("read"):
                found = await self.upstream.get(name, start, length)
        return found

    async def get_manifest(self, name: str) -> bytes | None:
        """Return the upstream's manifest; the directory's while the upstream does not answer."""
        found: bytes | None = await self._ask("read", lambda: self.upstream.get(name), _NO_ANSWER)
        return found if found is not _NO_ANSWER else await super().get(name)

    async def head(self, name: str) -> ObjectInfo | None:
        """Look in the upstream, and in the directory only while that fails: a writer leaves out what is there."""
        found: ObjectInfo | None = await self._ask("read", lambda: self.upstream.head(name), _NO_ANSWER)
        return found if found is not _NO_ANSWER else await super().head(name)

    async def report_damage(self, manifest_name: str) -> bool:
        """Check what the directory has; what it does not have, the upstream checks."""
        self._keeper.give_up(manifest_name)
        if await super().head(manifest_name) is not None:
            return await super().report_damage(manifest_name)
        with self._asking("read"):
            return await self.upstream.report_damage(manifest_name)

    # Writing

    async def put(self, name: str, data: Content) -> None:
        if not require_name(name).is_manifest:
            await super().put(name, data)
            with self._asking("write"):
                await self.upstream.put(name, data)
            return
        with self._asking("write"):
            await self.upstream.put(name, data)
        await self._follow(name, bytes_of(data))

    async def create(self, name: str, data: bytes) -> bool:
        with self._asking("write"):
            current = await self.upstream.get(name)
            if current is None:
                await self.upstream.put(name, data)
            elif current != data:
                return False
        await self._follow(name, data)
        return True

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        with self._asking("write"):
            if not await self.upstream.replace(name, data, expected_digest):
                return False
        await self._follow(name, data)
        return True

    async def _follow(self, name: str, data: bytes) -> None:
        """Keep a manifest that the upstream has taken, or none if its data is not all here."""
        try:
            await super().put(name, data)
        except StoreError as e:
            if e.reason != "invalid":  # as it is if data is missing
                self._on_failure("keep", e)
            with contextlib.suppress(StoreError):
                await super().delete(name)

    @asynccontextmanager
    async def upload(self, name: str, size_bytes: int | None = None) -> AsyncIterator[Upload]:
        async with super().upload(name, size_bytes) as upload:

            async def commit() -> None:
                await upload.commit()
                await self._send(name)

            yield replace(upload, commit=commit)

    async def _send(self, name: str) -> None:
        """Send data on that the directory has checked. It is not copied into memory: it was just written."""
        opened = await self.workers.open(lambda: files.open_object(self.root, name))
        if opened is None:
            raise StoreError("io", f"{name} was evicted before it was sent to the upstream", retriable=True)
        with opened.file as file, self._asking("write"):
            if not opened.info.size_bytes:
                await self.upstream.put(name, b"")
                return
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            await self.upstream.put(name, Pieces([memoryview(mapped)]))

    async def delete(self, name: str) -> bool:
        stem = require_name(name).segment.stem
        with self._asking("delete"):
            existed = await self.upstream.delete(name)
        self._keeper.give_up(f"{stem}.")
        return await super().delete(name) or existed

    async def delete_some(self, prefix: str, within_s: float) -> tuple[int, bool]:
        with self._asking("delete"):
            count = await self.upstream.delete_prefix(prefix)
        self._keeper.give_up(prefix)
        count_here, more = await super().delete_some(prefix, within_s)
        return max(count, count_here), more

    # Profiles, which servers share

    async def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        if kind is PROFILES:
            found: Sequence[ObjectInfo] | None = await self._ask("read", lambda: self.upstream.notes(kind), None)
            if found is not None:
                return found
        return await super().notes(kind)

    async def open_note(self, kind: NoteKind, name: str, length: int | None = None) -> OpenObject | None:
        opened = await super().open_note(kind, name)
        if opened is not None or kind is not PROFILES:
            return opened
        with self._asking("read"):
            content = await self.upstream.get_note(kind, name, length)
        if content is None:
            return None
        if length is None:
            try:
                async with super().upload_note(kind, name, len(content)) as upload:
                    await upload.write(content)
                    await upload.commit()
            except StoreError as e:  # the directory may have less room than the upstream
                self._on_failure("keep", e)
        return await super().open_note(kind, name) or await asyncio.to_thread(files.in_memory, name, content)

    @asynccontextmanager
    async def upload_note(self, kind: NoteKind, name: str, size_bytes: int) -> AsyncIterator[Upload]:
        async with super().upload_note(kind, name, size_bytes) as upload:

            async def commit() -> None:
                await upload.commit()
                if kind is PROFILES:
                    content = await self.get_note(kind, name)
                    assert content is not None
                    try:
                        with self._asking("write"):
                            await self.upstream.put_note(kind, name, content)
                    except BaseException:
                        await super(FrontStore, self).delete_note(kind, name)
                        raise

            yield replace(upload, commit=commit)

    async def delete_note(self, kind: NoteKind, name: str) -> bool:
        existed = await super().delete_note(kind, name)
        if kind is PROFILES:
            with self._asking("delete"):
                existed = await self.upstream.delete_note(kind, name) or existed
        return existed

    # The rest

    async def usage(self) -> StoreUsage:
        """Ask the upstream, too, unless it has answered what it was asked last."""
        if self._problem is not None:
            await self._ask("lookup", lambda: self.upstream.folders(_NO_DIGEST), None)
        usage = await super().usage()
        return usage if usage.write_problem is not None else replace(usage, write_problem=self._problem)

    async def close(self) -> None:
        await self._keeper.close()
        await self.upstream.close()
        await super().close()


def _size_of(hit: SegmentHit) -> int:
    return len(hit.manifest) + _HIT_BYTES
