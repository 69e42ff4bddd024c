"""What moves bytes between a client and a store: ranged reads, received in place, and uploads, over real sockets."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from harness.small_segments import data_object
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.container.objects import Pieces
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import HttpOptions, transfers
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.transfers import Transfers
from tests.stores.conformance import failing

CONTENT = bytes(range(256)) * 4096
Answer = Callable[[int, int, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request for a range with ``answer``. ``requests``: the ranges, by connection."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[list[tuple[int, int]]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.head = ""  # the last one

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[tuple[int, int]] = []
        self.requests.append(mine)
        self.writers.append(writer)
        try:
            while True:
                self.head = (await reader.readuntil(b"\r\n\r\n")).decode()
                start, end = self.head.split("bytes=")[1].split("\r\n")[0].split("-")
                mine.append((int(start), int(end) + 1))
                await self.answer(int(start), int(end) + 1, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def head(start: int, end: int, *, status: str = "206 Partial Content", more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-range: bytes {start}-{end - 1}/{len(CONTENT)}\r\n"
        f"Content-Length: {end - start}\r\n{more}\r\n"
    ).encode()


async def right(start: int, end: int, writer: asyncio.StreamWriter) -> None:
    writer.write(head(start, end) + CONTENT[start:end])


Start = Callable[[Answer], Awaitable[tuple[Server, Transfers, str]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(answer: Answer) -> tuple[Server, Transfers, str]:
            server = Server(answer)
            listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            receiver = Transfers(url, {"Authorization": "Bearer t"}, True, WAIT_S, 32)
            for close in (server.close, listening.close, receiver.close):
                stack.callback(close)
            return server, receiver, f"{url}/object"

        yield begin


async def read(receiver: Transfers, url: str, start: int, end: int) -> bytes | None:
    into, pieces = bytearray(end - start), list[int]()
    answer = await receiver.receive(url, start, [memoryview(into)], pieces.append)
    assert sum(pieces) == (end - start if answer.status == 206 else 0)
    return bytes(into) if answer.status == 206 else None


async def test_a_connection_serves_one_range_after_another(start: Start) -> None:
    server, receiver, url = await start(right)
    for first, end in ((0, 1), (1000, 500_000), (len(CONTENT) - 1, len(CONTENT)), (0, len(CONTENT))):
        assert await read(receiver, url, first, end) == CONTENT[first:end]
    assert [len(each) for each in server.requests] == [4]
    assert re.match(
        r"GET /object HTTP/1.1\r\nHost: 127.0.0.1:.*\r\nAuthorization: Bearer t\r\n", server.head, re.DOTALL
    )
    ranges = [(i * 1000, i * 1000 + 100_000) for i in range(8)]
    found = await asyncio.gather(*(read(receiver, url, *each) for each in ranges))
    assert found == [CONTENT[first:end] for first, end in ranges]
    await read(receiver, url, 0, 10)
    assert len(server.requests) == 8  # ranges that are read at once have connections of their own


UNSIZED = b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-99/1000\r\nTransfer-Encoding: chunked\r\n\r\n"


def answering(answer: bytes) -> Answer:
    async def say(first: int, end: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return say


# Answers to a request for the first 100 bytes: as what they count, and the reason of the error.
OTHERS = {
    "missing": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", 404, None),
    "the whole object": (head(0, 100, status="200 OK") + CONTENT[:100], 200, None),
    "another range": (head(1, 101) + CONTENT[1:101], None, "protocol"),
    "a shorter range": (head(0, 50) + CONTENT[:50], None, "truncated"),
    "an empty range": (b"HTTP/1.1 206 P\r\nContent-Range: bytes 5-4/10\r\nContent-Length: 0\r\n\r\n", None, "protocol"),
    "other units": (head(0, 100).replace(b"bytes", b"lines") + CONTENT[:100], None, "protocol"),
    "a huge range": (head(0, 100).replace(b"-99", b"-99999999999999999999") + CONTENT[:1], None, "protocol"),
    "no range": (b"HTTP/1.1 206 P\r\nContent-Length: 100\r\n\r\n" + CONTENT[:100], None, "protocol"),
    "another length": (head(0, 100).replace(b": 100", b": 99") + CONTENT[:99], None, "truncated"),
    "more than the range": (head(0, 100) + CONTENT[:101], None, "protocol"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", None, "protocol"),
    "a head without an end": (b"HTTP/1.1 206 P\r\n" + b"X: y\r\n" * 40_000, None, "protocol"),
    "no length": (b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-99/1000\r\n\r\n" + CONTENT[:100], 206, None),
    "chunks": (UNSIZED + b"50\r\n" + CONTENT[:80] + b"\r\n14\r\n" + CONTENT[80:100] + b"\r\n0\r\n\r\n", 206, None),
    "a chunk of -1 bytes": (UNSIZED + b"-1\r\n" + bytes(1 << 20), None, "protocol"),
    "chunks of one byte": (UNSIZED + b"1;%b\r\nx\r\n" % (b"y" * 9000) * 100, None, "protocol"),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_what_is_not_the_range_is_told(start: Start, name: str) -> None:
    answer, status, reason = OTHERS[name]
    server, receiver, url = await start(answering(answer))
    into = bytearray(100)
    reading = receiver.receive(url, 0, [memoryview(into)], lambda num_bytes: None)
    if reason is not None:
        with failing(reason):
            await reading
    else:
        assert (await reading).status == status
        assert into == (CONTENT[:100] if status == 206 else bytes(100))
    server.answer = right
    assert await read(receiver, url, 0, 100) == CONTENT[:100]


async def test_bytes_that_follow_an_answer_belong_to_no_other(start: Start) -> None:
    async def more(first: int, end: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(first, end) + CONTENT[first : end - 1])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(CONTENT[end - 1 : end + 1000])

    server, receiver, url = await start(more)
    assert await read(receiver, url, 0, 100_000) == CONTENT[:100_000]
    server.answer = right
    with suppress(StoreError):  # they come behind the next request, and are no answer to it
        assert await read(receiver, url, 7, 1000) == CONTENT[7:1000]
    assert await read(receiver, url, 7, 1000) == CONTENT[7:1000]


async def test_an_idle_or_closed_connection_is_not_used_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def last(first: int, end: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(first, end, more="Connection: close\r\n") + CONTENT[first:end])

    for answer, idle_s in ((last, 60.0), (right, -1.0)):
        server, receiver, url = await start(answer)
        monkeypatch.setattr(transfers, "_IDLE_S", idle_s)
        for _ in range(3):
            assert await read(receiver, url, 0, 10) == CONTENT[:10]
        assert [len(each) for each in server.requests] == [1, 1, 1]


async def test_nothing_is_written_once_a_read_is_cancelled(start: Start) -> None:
    may_go_on = asyncio.Event()

    async def pause(first: int, end: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(first, end) + CONTENT[first : first + 1000])
        await may_go_on.wait()
        writer.write(CONTENT[first + 1000 : end])

    server, receiver, url = await start(pause)
    into, pieces = bytearray(5000), list[int]()
    reading = asyncio.create_task(receiver.receive(url, 0, [memoryview(into)], pieces.append))
    await until(lambda: sum(pieces) == 1000)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    may_go_on.set()
    server.answer = right
    assert await read(receiver, url, 0, 10) == CONTENT[:10]
    assert into[1000:] == bytes(4000)
    assert len(server.requests) == 2


MIB = 1 << 20


@pytest.mark.process
async def test_uploads_of_pieces_side_by_side_are_whole(tmp_path: Path) -> None:
    contents = [[bytes([n + i]) * (300_000 + n) for i in range(4)] for n in range(12)]
    wholes = [b"".join(each) for each in contents]
    with StoreProcess(tmp_path) as process:
        store = HttpStore(process.url)
        await asyncio.gather(*(store.put(data_object(w), Pieces(c)) for w, c in zip(wholes, contents, strict=True)))
        assert [await store.get(data_object(whole)) == whole for whole in wholes] == [True] * 12
        with failing("invalid", "does not match the digest"):
            await store.put(data_object(b"another"), wholes[0])
        assert await store.get(data_object(b"another")) is None
        await store.close()


@pytest.mark.process
async def test_a_server_that_refuses_at_once_is_heard(tmp_path: Path) -> None:
    """It does not read the body, of which the sockets take only a part."""
    content = bytes(64 * MIB)
    with StoreProcess(tmp_path, config={"max_body_bytes": MIB}) as process:
        store = HttpStore(process.url)
        with failing("too_large"):
            await store.put(data_object(content), content)
        await store.close()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BOMBS = {
    "a chunk of -5 bytes": (CHUNKED + b"-5\r\n", bytes(MIB)),
    "a huge chunk": (CHUNKED + b"ffffffffffff\r\n", bytes(MIB)),
    "chunks": (CHUNKED, b"1\r\nx\r\n" * 10_000),
    "trailers": (CHUNKED + b"0\r\n", b"A: b\r\n" * 10_000),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 10_000),
    "a line": (b"HTTP/1.1 200 OK\r\nA: ", bytes(MIB)),
    "provisional answers": (b"", b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" * 1000),
    "a body without a length": (b"HTTP/1.1 500 No\r\n\r\n", bytes(MIB)),
    "no HTTP": (b"220 ready\r\n", b"220 ready\r\n"),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_an_answer_without_an_end_takes_no_memory(name: str) -> None:
    begin, more = BOMBS[name]
    content = bytes(MIB)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken, _ = listener.accept()
            with taken, suppress(OSError):
                while taken.recv(MIB)[-1:] != b"\0":  # to the body
                    pass
                taken.sendall(begin)
                while True:
                    taken.sendall(more)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = HttpStore(url, options=HttpOptions(timeout_s=1.0, max_attempts=1))
        tracemalloc.start()
        try:
            with failing("protocol") if name == "no HTTP" else suppress(StoreError):
                await store.put(data_object(content), content)  # some begin as an answer does
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()
            await store.close()
        thread.join(WAIT_S)
