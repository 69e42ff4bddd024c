"""benchmarks.stores: what its relays count, and a small run over real servers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import redis

from benchmarks.stores.__main__ import main
from benchmarks.stores.relay import Exchange, Relay, round_trips
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess


def exchange(begin_s: float, end_s: float) -> Exchange:
    return Exchange("GET", False, begin_s, end_s, answer_bytes=1)


@pytest.mark.parametrize(
    ("exchanges", "trips"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 2), (0.1, 1), (0.2, 3)], 1),  # at once
        ([(0, 1), (1, 2), (2, 3)], 3),  # each after the one before
        ([(0, 10), (0, 1), (2, 3), (4, 5)], 3),  # the long one is beside the others
    ],
)
def test_round_trips_are_the_longest_chain(exchanges: list[tuple[float, float]], trips: int) -> None:
    assert round_trips([exchange(*times) for times in exchanges]) == trips


def test_what_was_not_answered_is_no_round_trip() -> None:
    assert round_trips([Exchange("GET", False, 0.0)]) == 0


@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
def test_a_relay_counts_requests_and_delays_them() -> None:
    rtt_s = 0.1
    with RedisProcess() as server, Relay("127.0.0.1", server.port, rtt_s) as relay:
        client = redis.Redis(port=relay.port)
        begin_s = time.monotonic()
        client.set("key", b"x" * 1000)
        assert client.get("key") == b"x" * 1000
        assert time.monotonic() - begin_s >= 3 * rtt_s  # connecting took a trip, too
        client.close()
        passed = relay.take()
        assert relay.take() == []
    assert [each.method for each in passed][-2:] == ["SET", "GET"]
    assert [each.is_first for each in passed] == [True] + [False] * (len(passed) - 1)
    assert round_trips(passed) == len(passed)
    assert passed[-1].answer_bytes > 1000


@pytest.mark.slow
@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
def test_a_small_run_counts_the_requests_of_each_store(tmp_path: Path) -> None:
    sizes = [
        "--segments",
        "512",
        "512",
        "--question-tokens",
        "128",
        "--layers",
        "1",
        "--hits",
        "1",
        "--rtt-ms",
        "0",
        "1",
    ]
    assert main([*sizes, "--get-usd", "0.5", "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    rows = {row["store"]: row for row in result["stores"]}
    serve, plain, presigned, indexed, disk = rows.values()
    assert serve["lookup_requests"] == {"store POST": 1}
    assert indexed["lookup_requests"]["index EVAL"] == disk["lookup_requests"]["index EVAL"] == 1
    # Clients may ask again now and then, when a server closes the connection that they ask on.
    gets = [row["lookup_requests"].get("s3 GET", 0) for row in rows.values()]
    at_least = [0, 5 + 4 + 2, 5 + 4 + 2, 2, 2]  # 18 pages, 10, 2
    assert all(n <= found <= n + 3 for n, found in zip(at_least, gets, strict=True)), gets
    at_least = [1, 3, 3, 2, 2]
    trips = [row["lookup_round_trips"] for row in rows.values()]
    assert all(n <= found <= n + 3 for n, found in zip(at_least, trips, strict=True)), trips
    num_reads = serve["fetch_requests"]["store GET"]
    reads = [row["fetch_requests"]["s3 GET"] for row in (plain, presigned, indexed)]
    assert all(num_reads <= found <= num_reads + 3 for found in reads), (num_reads, reads)
    assert (disk["fetch_requests"], disk["fetch_round_trips"]) == ({}, 0)
    counted = [lookup + fetch for lookup, fetch in zip(gets, [0, *reads, 0], strict=True)]
    assert [row["usd_a_million_hits"] for row in rows.values()] == [0.5 * requests for requests in counted]
    for row in rows.values():
        assert row["by_rtt_ms"]["1"]["hit_s"]["p50"] > 1e-3 * (row["lookup_round_trips"] + row["fetch_round_trips"])


def test_segments_that_no_writer_makes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--segments", "1024", "2048"])
    assert "2048 tokens cannot be a segment at token 1024" in capsys.readouterr().err
