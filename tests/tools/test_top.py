"""``kvfetch top``, with a real store, in a terminal and without one."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.tools.top import StoreMetrics, activity, parse
from tests.tools.conftest import kvfetch, kvfetch_json

CHAIN = page_hashes(4)
TEXT = """\
kvfetch_server_stored_bytes 1000.0
kvfetch_server_capacity_bytes +Inf
kvfetch_server_segments 3.0
kvfetch_server_requests_in_flight 1.0
kvfetch_server_lookup_pages_total{{result="hit"}} {hit}
kvfetch_server_lookup_pages_total{{result="miss"}} 10.0
kvfetch_server_lookups_total{{result="hit"}} 4.0
kvfetch_server_requests_total{{method="GET",route="/a",status="200"}} 5.0
kvfetch_server_requests_total{{method="PUT",route="/a",status="507"}} {full}
kvfetch_server_requests_total{{method="PUT",route="/b",status="507"}} 1.0
kvfetch_server_request_seconds_bucket{{method="POST",route="/v1/lookup",le="0.1"}} 98.0
kvfetch_server_request_seconds_bucket{{method="POST",route="/v1/lookup",le="1.0"}} 99.0
kvfetch_server_request_seconds_bucket{{method="POST",route="/v1/lookup",le="+Inf"}} 100.0
kvfetch_server_request_seconds_bucket{{method="GET",route="/a",le="0.1"}} 500.0
kvfetch_server_sent_bytes_total {sent}
"""


def sample(at_s: float, hit: float = 30.0, full: float = 1.0, sent: float = 100.0) -> StoreMetrics:
    return StoreMetrics(at_s, parse(TEXT.format(hit=hit, full=full, sent=sent)))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    """Holds one segment, and has answered a lookup that found half."""
    with StoreProcess(tmp_path, extra_args=["--capacity", "1MiB", "--token", "secret"]) as process:
        client = HttpStore(process.url, token="secret")
        await put_segment(client, make_segment(CHAIN, 0, 2))
        assert (await client.lookup(FOLDER, CHAIN)).num_pages == 2
        await client.close()
        yield process


def test_what_happened_a_second_between_two_samples() -> None:
    rates = activity(sample(10.0), sample(12.0, hit=50.0, full=7.0, sent=300.0))
    assert (rates.sent_bytes, rates.requests, rates.errors) == (100.0, 3.0, {"507": 3.0})
    assert (rates.stored_bytes, rates.segments, rates.capacity_bytes) == (1000.0, 3.0, None)
    assert (rates.lookups, rates.pages_found, rates.lookup_p99_s) == (0.0, 1.0, None)


def test_what_happened_since_the_stores_start() -> None:
    total = activity(None, sample(10.0))
    assert (total.sent_bytes, total.requests, total.errors) == (100.0, 7.0, {"507": 2.0})
    assert (total.lookups, total.pages_found, total.lookup_p99_s) == (4.0, 0.75, 1.0)


def test_a_store_that_was_started_again_begins_at_zero() -> None:
    assert activity(sample(10.0, sent=900.0), sample(12.0, sent=50.0)).sent_bytes == 25.0


def test_one_interval_as_json(store: StoreProcess) -> None:
    now = kvfetch_json("top", store.url, "--token", "secret", "--interval", "0.1")
    assert (now["segments"], now["capacity_bytes"], now["lookups"], now["pages_found"]) == (1, 1 << 20, 0, None)
    assert now["stored_bytes"] > 1000


def test_one_interval_as_text(store: StoreProcess) -> None:
    lines = kvfetch("top", store.url, "--token", "secret", "--interval", "0.1").stdout.splitlines()
    assert [line.split() for line in lines if "pages found" in line] == [["pages", "found", "-", "50%"]]
    assert any(line.startswith("stored") and line.rstrip().endswith("of 1 MiB") for line in lines)


def test_a_wrong_token(store: StoreProcess) -> None:
    result = kvfetch("top", store.url, "--token", "wrong")
    assert result.exit_code == 2
    assert "/metrics: HTTP Error 401" in result.stderr


def test_what_is_no_store_of_ours(store: StoreProcess, tmp_path: Path) -> None:
    assert "expected http://HOST:PORT" in kvfetch("top", str(tmp_path)).stderr
    assert "is not what kvfetch serve answers" in kvfetch("top", f"{store.url}/healthz?").stderr


def test_a_terminal_shows_it_until_ctrl_c(store: StoreProcess) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "top", store.url, "--token", "secret", "--interval", "0.2"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as top:
        os.close(theirs)
        shown = b""
        while shown.count(b"99% of lookups within") < 2:
            shown += os.read(ours, 4096)
        store.kill()
        while b"refused" not in shown:
            shown += os.read(ours, 4096)
        store.start()
        at = len(shown)
        while b"segments" not in shown[at:]:
            shown += os.read(ours, 4096)
        top.send_signal(signal.SIGINT)
        assert top.wait() == 0
    os.close(ours)
