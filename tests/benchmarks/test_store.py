from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.store.__main__ import main
from benchmarks.store.nginx import find_nginx
from benchmarks.store.ranges import read_ranges
from benchmarks.store.small import SEGMENTS_A_PROMPT, fill, prompt_hashes, prompt_segments
from harness.small_segments import FOLDER
from sgl_kvfetch.directory.local import LocalStore

SMALL = ["--rounds", "1", "--seconds", "0.2", "--segments", "200", "--lookup-seconds", "1", "--clients", "1,2"]


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ["--sizes", "1", "--connections", "1,2"]
    assert main([*SMALL, *sizes, "--directory", str(tmp_path), "--json", str(out), "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())
    if find_nginx() is None:
        assert found["serving"] is None
    else:
        assert [(row["range_mib"], row["connections"]) for row in found["serving"]["rows"]] == [(1, 1), (1, 2)]
        assert all(row["ratio"] > 0 and row["store_cpu_s_per_gb"] > 0 for row in found["serving"]["rows"])
    assert found["start"]["filled"]["first_lookup_s"] > 0
    assert found["start"]["filled"]["rss_bytes"] > 0
    idle, evicting = found["lookups"]["idle"], found["lookups"]["evicting"]
    assert idle["share_found"] == 1
    assert 0 < idle["p50_s"] <= idle["p99_s"] <= idle["max_s"]
    assert len(idle["latencies_s"]) == len(evicting["latencies_s"]) == 100
    assert evicting["evicted_segments"] > 0
    assert [row["clients"] for row in found["writes"]] == [1, 2]
    assert all(row["segments_per_s"] > 0 and not row["runs"][0]["write_errors"] for row in found["writes"])
    assert picture.stat().st_size > 0


async def test_small_segments_are_real(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    store = LocalStore(tmp_path)
    try:
        await store.rebuild()
        for prompt in range(3):
            found = await store.lookup(FOLDER, prompt_hashes(prompt))
            segments = list(prompt_segments(prompt))
            assert [hit.manifest for hit in found.hits] == [segment.manifest for segment in segments]
            assert [await store.get(segment.data_name) for segment in segments] == [segments[0].data] * len(segments)
        assert (await store.usage()).num_segments == 3 * SEGMENTS_A_PROMPT
    finally:
        await store.close()


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A server that sends one answer to each request of one connection, and then closes it."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in answers:
                connection.recv(4096)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.join()


def ranged(body: bytes, length: int) -> bytes:
    return b"HTTP/1.1 206 Partial Content\r\ncontent-length: %d\r\n\r\n" % length + body


def test_ranges_are_counted_without_headers() -> None:
    body = bytes(100_000)
    with answering(ranged(body, len(body))) as port:
        reading = read_ranges(port, "/x", 1 << 20, len(body), connections=1, seconds=0)
    assert reading.received_bytes == len(body)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(1000), "expected status 206"),
        (ranged(bytes(999), 999), "expected 1000 bytes, found 999"),
        (ranged(bytes(999), 1000), "closed in mid-body"),
        (b"", "closed before the headers"),
    ],
)
def test_any_other_answer_is_an_error(answer: bytes, problem: str) -> None:
    with answering(answer) as port, pytest.raises(ConnectionError, match=problem):
        read_ranges(port, "/x", 1 << 20, 1000, connections=1, seconds=0)
