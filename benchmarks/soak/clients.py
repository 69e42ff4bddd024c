"""Clients that use a store at random, as SGLang's servers and operators do, and check everything that they read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from benchmarks.soak.ledger import Ledger
from benchmarks.soak.world import NOISE_HEADS, PROMPT_PAGES, Segment, Version, World, WrongError
from harness.reading import read_bytes
from harness.small_segments import data_object
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.write.writer import delete_segment
from sgl_kvfetch.stores.base import AdminStore, object_digest
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.wire import Route

T = TypeVar("T")

TIMEOUT_S = 15.0
_ORPHAN_BYTES = 64 << 10
_LOOKUPS_AGAIN = 5
_SLOW_PIECE_BYTES = 64 << 10
_SLOW_PAUSE_S = 0.4


class Busy:
    """Which segments are being written or deleted, so that no client deletes what another is about to commit."""

    def __init__(self) -> None:
        self._writing: Counter[str] = Counter()
        self._deleting: set[str] = set()

    @contextmanager
    def writing(self, name: str) -> Iterator[bool]:
        """Yield False if the segment is being deleted."""
        if name in self._deleting:
            yield False
            return
        self._writing[name] += 1
        try:
            yield True
        finally:
            self._writing[name] -= 1

    @contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Yield False if the segment is being written or deleted."""
        if self._writing[name] or name in self._deleting:
            yield False
            return
        self._deleting.add(name)
        try:
            yield True
        finally:
            self._deleting.remove(name)


class Client:
    """One client. ``run`` does one operation after another; each is a method that returns its result for the report."""

    def __init__(self, number: int, port: int, world: World, ledger: Ledger, busy: Busy, seed: int) -> None:
        self._port = port
        self._world = world
        self._ledger = ledger
        self._busy = busy
        self._seed = f"{seed} client {number}"
        self._rng = random.Random()  # seeded before each operation, so that none depends on how another ended
        self._names = list(world.segments)
        self._store: AdminStore = HttpStore(f"http://127.0.0.1:{port}", options=HttpOptions(timeout_s=TIMEOUT_S))

    async def run(self, stop: asyncio.Event) -> None:
        weights = [weight for weight, _ in _OPERATIONS.values()]
        try:
            for number in itertools.count():
                if stop.is_set():
                    break
                self._rng.seed(f"{self._seed} {number}")
                ((name, (_, operation)),) = self._rng.choices(list(_OPERATIONS.items()), weights)
                await observed(self._ledger, name, partial(operation, self))
        finally:
            await self._store.close()

    async def _read(self) -> str:
        """Look up a part of a prompt, and read some bytes of each segment that was found."""
        prompt = _popular(self._rng, self._world.prompts)
        first = self._rng.choice((0, 0, 0, self._rng.randrange(PROMPT_PAGES)))
        asked = prompt[first : self._rng.randint(first + 1, PROMPT_PAGES)]
        began_s = time.monotonic()
        found = await self._store.lookup(NOISE_HEADS.folder, asked)
        self._ledger.record_lookup(began_s)
        if found.num_pages > len(asked):
            raise WrongError(f"a lookup of {len(asked)} pages returned {found.num_pages}")
        for hit in found.hits:
            version = self._world.version_of(hit, asked)
            if not await self._read_some(version):
                await self._require_gone(version, asked)
                return "gone"  # evicted or deleted since the lookup
            asked = asked[hit.num_pages :]
        return "hit" if not asked else "partial" if found.hits else "miss"

    async def _read_some(self, version: Version) -> bool:
        """Read a range. Return False if the object is gone."""
        start = self._rng.choice((0, self._rng.randrange(len(version.data))))
        length = self._rng.randint(1, len(version.data) - start) if start else len(version.data)
        content = await read_bytes(self._store, version.data_name, start, length)
        if content is None:
            return False
        _require_same(version.data_name, content, version.data[start : start + length])
        return True

    async def _require_gone(self, version: Version, asked: Sequence[bytes]) -> None:
        """Check that lookups do not go on returning a segment without its data."""
        for _ in range(_LOOKUPS_AGAIN):
            found = await self._store.lookup(NOISE_HEADS.folder, asked)
            if all(hit.manifest != version.manifest for hit in found.hits):
                return
            if await self._store.head(version.data_name) is not None:
                return  # written again meanwhile
        raise WrongError(f"lookups go on returning a segment whose data are gone: {version.data_name}")

    async def _write(self) -> str:
        segment = self._segment()
        with self._busy.writing(segment.name) as allowed:
            if not allowed:
                return "busy"
            version = self._rng.choice(segment.versions)
            await self._store.put(version.data_name, version.data)
            await self._store.put(segment.name, version.manifest)
            self._ledger.committed(segment.name)
        return "done"

    async def _replace(self) -> str:
        """Put another encoding in the place of the stored one, as ``kvfetch encode`` does."""
        segment = self._segment()
        with self._busy.writing(segment.name) as allowed:
            stored = await self._store.get(segment.name) if allowed else None
            if stored is None:
                return "busy" if not allowed else "missing"
            known = [version.manifest for version in segment.versions]
            if stored not in known:
                raise WrongError(f"{segment.name} has content that nobody wrote")
            version = segment.versions[1 - known.index(stored)]
            await self._store.put(version.data_name, version.data)
            replaced = await self._store.replace(segment.name, version.manifest, object_digest(stored))
        return "done" if replaced else "changed"

    async def _delete(self) -> str:
        segment = self._segment()
        with self._busy.deleting(segment.name) as allowed:
            if not allowed:
                return "busy"
            self._ledger.deleting(segment.name)
            match self._rng.randrange(4):
                case 0:
                    return "done" if await self._store.delete(segment.name) else "missing"
                case 1:
                    found = await self._store.delete(self._rng.choice(segment.versions).data_name)
                    return "done" if found else "missing"
                case 2:
                    await delete_segment(self._store, decode_manifest(segment.versions[0].manifest))
                case _:
                    await self._store.delete_prefix(segment.name.removesuffix(".kvm"))
        return "done"

    async def _list(self) -> str:
        async for info in self._store.list():
            segment = self._world.segments.get(info.name)
            if segment is not None and info.size_bytes not in {len(v.manifest) for v in segment.versions}:
                raise WrongError(f"{info.name} is listed with {info.size_bytes} bytes")
        return "done"

    async def _leave_orphan(self) -> str:
        """Put data as a writer does that dies before its manifest."""
        content = self._rng.randbytes(_ORPHAN_BYTES)
        await self._store.put(data_object(content), content)
        return "done"

    async def _break_off_upload(self) -> str:
        """Send half of a data object, and go."""
        content = self._rng.randbytes(_ORPHAN_BYTES)
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                f"PUT {Route.OBJECTS}/{data_object(content)} HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
            )
            writer.write(content[: len(content) // 2])
            await writer.drain()
        finally:
            writer.transport.abort()
        return "done"

    async def _break_off_read(self) -> str:
        version = self._rng.choice(self._segment().versions)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0, 0.005)):
                await self._store.get(version.data_name)
        return "done"

    def _segment(self) -> Segment:
        return self._world.segments[_popular(self._rng, self._names)]


def _popular(rng: random.Random, items: Sequence[T]) -> T:
    """Choose one at random, the first ones most often: half of all choices are in the first eighth."""
    return items[int(len(items) * rng.random() ** 3)]


_OPERATIONS: dict[str, tuple[int, Callable[[Client], Awaitable[str]]]] = {  # with their weights
    "read": (50, Client._read),
    "write": (36, Client._write),
    "replace": (4, Client._replace),
    "delete": (4, Client._delete),
    "list": (1, Client._list),
    "upload without manifest": (2, Client._leave_orphan),
    "upload broken off": (2, Client._break_off_upload),
    "read broken off": (1, Client._break_off_read),
}


async def read_slowly(number: int, port: int, world: World, ledger: Ledger, stop: asyncio.Event, seed: int) -> None:
    """Read whole objects over a slow link, one after another, until ``stop``. A store may break off such reads."""
    rng = random.Random(f"{seed} slow reader {number}")
    longest = [segment for segment in world.segments.values() if len(segment.page_hashes) == PROMPT_PAGES]

    async def read_one() -> str:
        version = rng.choice(_popular(rng, longest).versions)
        try:
            received, wanted = await _receive_slowly(port, version.data_name, stop)
        except (OSError, asyncio.IncompleteReadError):
            return "broken off"
        if wanted is None:
            return "missing"
        if wanted != len(version.data):
            raise WrongError(f"{version.data_name} was answered with {wanted} bytes")
        _require_same(version.data_name, received, version.data[: len(received)])
        return "done" if len(received) == wanted else "broken off"

    while not stop.is_set():
        await observed(ledger, "slow read", read_one)
        await asyncio.sleep(_SLOW_PAUSE_S)


async def _receive_slowly(port: int, name: str, stop: asyncio.Event) -> tuple[bytes, int | None]:
    """Return the bytes that came, and how many were announced; None if the object is missing.

    Buffers and segments are small, so that what was not read yet waits in the store, and not in its kernel.
    """
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    reader, writer = await asyncio.open_connection(sock=connection, limit=_SLOW_PIECE_BYTES)
    try:
        writer.write(f"GET {Route.OBJECTS}/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if " 404 " in headers:
            return b"", None
        wanted = int(headers.partition("content-length:")[2].split("\r\n")[0])
        received = b""
        while len(received) < wanted and not stop.is_set():
            piece = await reader.read(_SLOW_PIECE_BYTES)
            if not piece:
                break
            received += piece
            await asyncio.sleep(_SLOW_PAUSE_S)
        return received, wanted
    finally:
        writer.transport.abort()


async def observed(ledger: Ledger, name: str, operation: Callable[[], Awaitable[str]]) -> None:
    """Run one operation, and write its result into the ledger."""
    began_s = time.monotonic()
    try:
        ledger.note(name, await operation())
    except StoreError as e:
        ledger.note_error(name, e, began_s)
    except (OSError, asyncio.IncompleteReadError) as e:  # of the connections without a client
        ledger.note_error(name, StoreError("truncated", repr(e)), began_s)
    except WrongError as e:
        ledger.note(name, "wrong")
        ledger.problem(f"{name}: wrong", str(e))


def _require_same(name: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise WrongError(f"{name}: {len(found)} bytes that differ from the {len(expected)} that were written")
