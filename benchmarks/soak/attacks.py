"""What a hostile client sends to a store, in a process of its own: ``python -m benchmarks.soak.attacks URL``.

It prints ``ready`` when the segments that it needs are stored, and attacks until its standard input ends. Then it
prints, as JSON, how often each attack was answered with which status.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import aiohttp
import msgspec
import xxhash
from yarl import URL

from harness.small_segments import head_slice, make_segment, page_hashes, put_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.prompts import page_hashes as hashes_of
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.notes import Pin
from sgl_kvfetch.stores.wire import MAX_LOOKUP_PAGES, Route

_NUM_MODELS = 500
_NUM_LONG_NAMES = 30
_LONG_NAME_CHARS = 2000
_NUM_LARGE = 24
_PADDING_BYTES = 900_000
_PAUSE_S = 0.2
_TIMEOUT_S = 120.0
_LARGE = "large manifests"
_BUSY = (503,)  # the store says so and when to try again


class _Attack(NamedTuple):
    send: Callable[[], Awaitable[int | None]]  # returns the status of the answer
    answers: tuple[int, ...]  # what a store may answer
    at_once: int = 1


class Attacker:
    """Attacks the store at ``url``. ``answers`` counts attacks by name and status, ``wrong`` those with a status that
    is no answer to them."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.answers: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._url = url
        self._session = session
        tokens = [1_000_000_000 + number for number in range(MAX_LOOKUP_PAGES)]
        self._chain = hashes_of(tokens, 1)
        self._models = [
            f"{number} ".ljust(_LONG_NAME_CHARS * (number < _NUM_LONG_NAMES), "\x01") for number in range(_NUM_MODELS)
        ]
        self._large = page_hashes(_NUM_LARGE, _LARGE)

    async def prepare(self) -> None:
        """Store a prompt in many namespaces and pin it, and a prompt whose segments have manifests of nearly 1 MiB."""
        store = HttpStore(self._url)
        try:
            for model in self._models:
                await put_segment(store, make_segment(self._chain, 0, 2, model=model, codec="zstd"))
            await self._pin()
            for page in range(_NUM_LARGE):
                segment = make_segment(self._large, page, 1, model=_LARGE)
                await store.put(segment.data_name, segment.data)
                await store.put(segment.manifest.key.manifest_name, _padded(segment))
        finally:
            await store.close()

    async def run(self, stop: asyncio.Event) -> None:
        """Send all attacks at the same time, each again and again, until ``stop``."""
        folder = head_slice(self._models[0]).folder
        wide = {"namespace": head_slice(_LARGE).folder, "page_hashes": b"".join(self._large)}
        attacks = {
            "lookups": _Attack(
                partial(self._send, "POST", Route.LOOKUP, msgspec.msgpack.encode(wide)), (200, *_BUSY), 2
            ),
            "summary": _Attack(partial(self._send, "GET", Route.SUMMARY), (200, *_BUSY), 2),
            "segments": _Attack(partial(self._send, "GET", f"{Route.SEGMENTS}?folder={folder}"), (200, *_BUSY), 20),
            "pins": _Attack(self._pin, (201, *_BUSY)),
            "web page": _Attack(partial(self._send, "DELETE", f"{Route.OBJECTS}?prefix=", host="evil.example"), (421,)),
            "malformed": _Attack(self._send_malformed, (400, 404, 422)),
            "endless bodies": _Attack(self._trickle, (408, *_BUSY), 4),
        }
        ending = asyncio.create_task(stop.wait())
        tasks = [
            asyncio.create_task(self._repeat(name, attack))
            for name, attack in attacks.items()
            for _ in range(attack.at_once)
        ]
        try:
            await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ending, *tasks):
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _repeat(self, name: str, attack: _Attack) -> None:
        while True:
            try:
                status: int | str | None = await attack.send()
            except aiohttp.ClientOSError:  # the store may refuse a request, and close, before it has all of its body
                status = None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                status = type(error).__name__
            self.answers[f"{name}: {status or 'done'}"] += 1
            if status is not None and status not in attack.answers:
                self.wrong[f"{name}: {status}"] += 1
            await asyncio.sleep(_PAUSE_S)

    async def _send(self, method: str, path: str, body: bytes | None = None, host: str = "localhost") -> int:
        url = URL(self._url + path, encoded=True)
        data = None if body is None else io.BytesIO(body)
        async with self._session.request(method, url, data=data, headers={"Host": host}) as response:
            await response.read()
            return response.status

    async def _pin(self) -> int:
        """Pin a long prompt, which is stored in many namespaces."""
        pin = Pin("an attack", 1, b"".join(self._chain))
        return await self._send("PUT", f"{Route.NOTES}/pins/{pin.name}", pin.encode())

    async def _send_malformed(self) -> int:
        return await self._send(
            *random.choice(
                [
                    ("POST", Route.LOOKUP, b"\x82\xa9namespac\xff\xa0"),
                    ("GET", f"{Route.SEGMENTS}/%ff.kvm", None),
                    ("PUT", f"{Route.OBJECTS}/..%2f..%2fetc", b"x"),
                ]
            )
        )

    async def _trickle(self) -> int | None:
        """Announce a lookup of 1 MB, and send a byte a second of it. Return the status if there is an answer."""
        url = URL(self._url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            head = f"POST {Route.LOOKUP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
            writer.write(head.encode())
            while True:
                writer.write(b" ")
                try:
                    async with asyncio.timeout(1):
                        line = await reader.readline()
                except TimeoutError:
                    continue
                return int(line.split()[1]) if line else None
        finally:
            writer.transport.abort()


def _padded(segment: CodedSegment) -> bytes:
    """Return a segment's manifest with a large field that readers ignore."""
    body = msgspec.msgpack.decode(segment.manifest.encode()[12:-16])
    packed = msgspec.msgpack.encode(body | {"later": bytes(_PADDING_BYTES)})
    head = struct.pack("<4sHHI", b"KVFM", 2, 0, len(packed)) + packed
    return head + xxhash.xxh3_128_digest(head)


def open_session() -> aiohttp.ClientSession:
    """Return a session that uses no connection twice: the store may just have closed one that was idle."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), connector=connector)


async def _main(url: str) -> None:
    async with open_session() as session:
        attacker = Attacker(url, session)
        await attacker.prepare()
        print("ready", flush=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, sys.stdin.read)
        ended.add_done_callback(lambda _: stop.set())
        await attacker.run(stop)
    print(json.dumps({"answers": attacker.answers, "wrong": attacker.wrong}))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
