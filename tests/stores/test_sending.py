from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash

from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.objects import Pieces
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions
from tests.segments import SMALL, make_heads, page_hashes
from tests.stores.conformance import failing

PARTS = [bytes([n]) * (300_000 + n) for n in range(1, 20)]
FOLDER = make_heads(SMALL).folder
MIB = 1 << 20


def name_of(content: bytes) -> str:
    return f"{FOLDER}/4-{page_hashes(4)[-1].hex()}.{xxhash.xxh3_128_hexdigest(content)}.kvd"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
async def store(served: StoreProcess) -> AsyncIterator[HttpStore]:
    store = HttpStore(served.url)
    yield store
    await store.close()


@pytest.mark.process
async def test_what_lies_in_pieces_is_stored_as_one_object(store: HttpStore) -> None:
    whole = b"".join(PARTS)
    await store.put(name_of(whole), Pieces(PARTS))
    assert await store.get(name_of(whole)) == whole


@pytest.mark.process
async def test_uploads_side_by_side_are_whole(store: HttpStore) -> None:
    contents = [bytes([n]) * MIB for n in range(12)]
    await asyncio.gather(*(store.put(name_of(each), each) for each in contents))
    assert [await store.get(name_of(each)) == each for each in contents] == [True] * 12


@pytest.mark.process
async def test_the_servers_word_reaches_the_caller(store: HttpStore) -> None:
    with failing("invalid", "does not match the digest"):
        await store.put(name_of(b"another"), bytes(MIB))


@pytest.mark.process
async def test_a_server_that_refuses_at_once_is_heard(tmp_path: Path) -> None:
    """It does not read the body, of which the sockets take only a part."""
    content = bytes(64 * MIB)
    with StoreProcess(tmp_path, config={"max_body_bytes": MIB}) as process:
        store = HttpStore(process.url)
        with pytest.raises(StoreError) as caught:
            await store.put(name_of(content), content)
        await store.close()
    assert caught.value.reason == "too_large"


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BOMBS = {
    "a chunk of -1 bytes": (CHUNKED + b"-1\r\n", bytes(MIB)),
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
            reason = ""
            try:
                await store.put(name_of(content), content)  # some begin as an answer does
            except StoreError as e:
                reason = e.reason
            assert name != "no HTTP" or reason == "protocol"
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()
            await store.close()
        thread.join(WAIT_S)
