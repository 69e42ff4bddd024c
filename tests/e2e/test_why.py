"""``kvfetch why`` asks real servers: each reason that needs one, made on purpose, has its name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.attaching import attach, detach
from harness.children import data_planes
from harness.engine import ServerError, SGLangServer
from harness.faults import Fault
from harness.metrics import read_metric, written
from harness.s3_server import BUCKET, s3_config
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.reasons import ADVICE, Reason
from tests.e2e.conftest import Expected, make_prompt
from tests.e2e.device import begin, load_of, wait_until_parked
from tests.e2e.faults import DEADLINE_S, PAGES, Proxy, fetch_again, is_data, misses
from tests.e2e.shared import Shared
from tests.reasons import assert_why, reasons_in
from tests.tools.conftest import kvfetch_json

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

USABLE = PAGES - 1  # SGLang always computes the last token
# No deadline is passed: `why` names it as a second reason, where a busy machine passes one.
PATIENT: dict[str, Any] = {"prefetch_threshold": 64}
CONFIG = PATIENT | {"fetch_timeout_s": DEADLINE_S}


@pytest.fixture
def link(store: StoreProcess) -> Iterator[Proxy]:
    proxy = Proxy(store.port)
    yield proxy
    proxy.close()


def send(server: SGLangServer, seed: int, rid: str) -> list[int]:
    """Send a prompt that is not in the server's memory. Return the answer's first token."""
    server.flush()
    body = {"input_ids": make_prompt(seed), "rid": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    answer: dict[str, list[int]] = json.loads(server.request("POST", "/generate", body))
    return answer["output_ids"]


def store_prompt(server: SGLangServer, seed: int) -> None:
    with written(server, PAGES):
        send(server, seed, f"writes {seed}")


def why(store: StoreProcess, server: SGLangServer, seed: int, exit_code: int = 1) -> Any:
    prompt = str(make_prompt(seed))
    return kvfetch_json("why", store.url, "--server", server.url, "--prompt", prompt, exit_code=exit_code)[0]


def assert_diverging_is_told(store: StoreProcess, server: SGLangServer, seed: int) -> None:
    """Ask for a stored prompt with another id in its beginning, as agents' sessions have it."""
    prompt = make_prompt(seed)
    prompt[100:103] = 5, 6, 7
    before = read_metric(server.metrics(), "sgl_kvfetch_diverged_pages_total")
    server.flush()
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    with written(server, PAGES - 6):
        server.request("POST", "/generate", {"input_ids": prompt, "rid": "diverges", "sampling_params": sampling})
    assert_why(why_request(store, server, "diverges"), Reason.DIVERGES, pages=range(6, USABLE))
    assert read_metric(server.metrics(), "sgl_kvfetch_diverged_pages_total") - before == USABLE - 6


def why_request(store: StoreProcess, server: SGLangServer, rid: str, exit_code: int = 1) -> Any:
    return kvfetch_json("why", store.url, "--server", server.url, "--request", rid, exit_code=exit_code)[0]


def test_what_became_of_requests(device: Shared, store: StoreProcess, link: Proxy) -> None:
    with device.attached(link.url, **PATIENT) as server:
        assert_why(why(store, server, 0), Reason.NEVER_WRITTEN)
        store_prompt(server, 0)
        found = why(store, server, 0, exit_code=0)
        assert (found["num_pages"], found["stored_pages"], found["page_size"]) == (PAGES, PAGES, 16)
        send(server, 0, "served")
        (decided,) = why_request(store, server, "served", exit_code=0)["decided"]
        counts = [decided[f"num_{what}"] for what in ("pages", "found", "served")]
        assert (counts, decided["reason"]) == ([USABLE] * 3, "")
        assert_diverging_is_told(store, server, 0)

        for size_bytes in (1 << 20, 70 << 20):  # users choose ids, of any length
            send(server, 0, "x" * size_bytes)
            why_request(store, server, "x" * size_bytes, exit_code=0)
        assert len(server.request("GET", "/server_info")) < 1 << 18

        send(server, 1, "new")
        assert_why(why_request(store, server, "new"), Reason.NEVER_WRITTEN)

        link.set(Fault("flip", after_bytes=500, only=is_data))
        send(server, 0, "flips")
        assert_why(why_request(store, server, "flips"), Reason.CORRUPT)
        detach(server)
        attach(server, link.url, **CONFIG)  # for what needs a deadline
        link.set(Fault("hang", only=is_data))
        send(server, 0, "hangs")
        assert_why(why_request(store, server, "hangs"), Reason.TIMEOUT)
        link.set(Fault("refuse"))
        assert_why(sent_until(Reason.SKIPPED, store, server, 0), Reason.SKIPPED)
        assert_why(why(store, server, 0), Reason.SKIPPED)


def sent_until(reason: Reason, store: StoreProcess, server: SGLangServer, seed: int) -> Any:
    """What becomes of a prompt that is sent until it falls short for this reason."""
    found: list[Any] = []

    def is_reached() -> bool:
        rid = f"{reason} {len(found)}"
        send(server, seed, rid)
        found.append(why_request(store, server, rid))
        return reason in reasons_in(found[-1])

    wait_until(is_reached, found=lambda: found[-1])
    return found[-1]


def test_what_fails_behind_a_request(device: Shared, store: StoreProcess, link: Proxy, expected: Expected) -> None:
    with device.attached(link.url, **PATIENT) as server, ThreadPoolExecutor(1) as pool:
        store_prompt(server, 0)
        for reason, fault in (
            (Reason.REFUSED, Fault("refuse")),
            (Reason.SERVER, Fault("error", status=500)),
            (Reason.PROXY, Fault("error", status=502)),
            (Reason.UNAUTHORISED, Fault("error", status=401)),
            (Reason.INVALID, Fault("error", status=400)),
            (Reason.PROTOCOL, Fault("error", status=418)),
            (Reason.TRUNCATED, Fault("close", after_bytes=1000, only=is_data)),
        ):
            link.set(fault)
            assert send(server, 0, reason) == expected[0].output_ids[:1]
            link.set(None)
            assert_why(why_request(store, server, reason), reason)
            fetch_again(server, 0)  # after three failures in a row, lookups would pause

        link.set(Fault("hang", only=is_data))
        server.flush()
        parked = begin(server, pool, 0, "aborted")
        wait_until_parked(server, 1)
        server.request("POST", "/abort_request", {"rid": "aborted"})
        with contextlib.suppress(ServerError):
            parked.result(WAIT_S)
        wait_until_parked(server, 0)
        assert_why(why_request(store, server, "aborted"), Reason.CANCELLED)

        link.set(Fault("hang", only=is_data))
        parked = begin(server, pool, 0, "loses its data plane")
        link.wait_for_data()
        for pid in data_planes():
            os.kill(pid, signal.SIGKILL)
        parked.result(WAIT_S)
        link.set(None)
        assert_why(why_request(store, server, "loses its data plane"), Reason.DATA_PLANE)
        fetch_again(server, 0)


class _LateS3(BaseHTTPRequestHandler):
    """Refuses all that it is asked, as S3 does where clocks differ by more than a quarter of an hour."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>")


def test_stores_that_do_not_speak_tls_or_refuse_the_clock(device: Shared, store: StoreProcess) -> None:
    with device.attached(store.url.replace("http:", "https:"), **PATIENT) as server:
        send(server, 0, "without TLS")
        assert_why(why_request(store, server, "without TLS"), Reason.TLS)
    with ThreadingHTTPServer(("127.0.0.1", 0), _LateS3) as s3:
        threading.Thread(target=s3.serve_forever, daemon=True).start()
        config = s3_config(f"http://127.0.0.1:{s3.server_port}")
        with device.attached(f"s3://{BUCKET}/kv", s3=config, **PATIENT) as server:
            send(server, 0, "late")
            assert_why(why_request(store, server, "late"), Reason.CLOCK)
        s3.shutdown()


def test_stores_that_do_not_take_pages(device: Shared, store: StoreProcess) -> None:
    # A file that may not grow has the effect of a full disk.
    full_disk = "prlimit", f"--fsize={256 << 10}", sys.executable, "-m", "sgl_kvfetch.tools"
    with device.attached(store.url, **PATIENT) as server:
        store_prompt(server, 0)
        store.stop()
        for seed, reason, limits in (
            (2, Reason.TOO_LARGE, {"config": {"max_body_bytes": 4096}}),
            (3, Reason.FULL, {"command": full_disk}),
            (4, Reason.IO, {}),
        ):
            if reason == Reason.IO:
                (folder,) = (path for path in store.directory.iterdir() if not path.name.startswith("."))
                shutil.rmtree(folder)
                folder.touch()  # in the way of what is written
            with StoreProcess(store.directory, port=store.port, **limits) as limited:
                with misses(server, "write", {reason}):
                    send(server, seed, reason)
                explained = why(limited, server, seed)
            assert_why(explained, Reason.NEVER_WRITTEN)
            assert f"writes have failed: {reason} ({ADVICE[reason][:16]}" in explained["findings"][0]["detail"]


def test_servers_that_read_late_or_nothing(device: Shared, store: StoreProcess, link: Proxy) -> None:
    with device.attached(link.url, **CONFIG) as server:
        # The first fetch measures the link: some pieces come, and the rest takes longer than the deadline.
        store_prompt(server, 6)
        link.set(Fault("slow", bytes_per_s=4e4, only=is_data))
        assert_why(sent_until(Reason.LATE, store, server, 6), Reason.LATE)
    with device.attached(store.url, mode="write_only", **CONFIG) as server:
        assert_why(why(store, server, 6), Reason.NOT_READING)
    with device.detached() as server:
        assert_why(why(store, server, 6), Reason.NOT_ATTACHED)


@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_prompt_that_is_computed_sooner(
    mode: str, store: StoreProcess, link: Proxy, request: pytest.FixtureRequest
) -> None:
    shared: Shared = request.getfixturevalue(mode)
    with shared.attached(link.url, **PATIENT | {"recompute": "auto"}) as server:
        store_prompt(server, 3)
        link.set(Fault("slow", bytes_per_s=2e3, only=is_data))
        assert_why(sent_until(Reason.SOONER, store, server, 3), Reason.SOONER)  # the first ones measure the link
        assert_why(why(store, server, 3), Reason.SOONER)
        link.set(None)


def test_host_mode(host: Shared, store: StoreProcess, link: Proxy) -> None:
    with host.attached(link.url, **PATIENT) as server:
        store_prompt(server, 4)
        send(server, 4, "served")
        (decided,) = why_request(store, server, "served", exit_code=0)["decided"]
        assert (decided["num_pages"], decided["num_found"], decided["num_served"]) == (USABLE, USABLE, USABLE)
        assert why(store, server, 4, exit_code=0)["decided"][-1] == decided
        store_prompt(server, 6)
        assert_diverging_is_told(store, server, 6)
        link.set(Fault("flip", after_bytes=500, only=is_data))
        send(server, 4, "flips")
        found = why_request(store, server, "flips")
        assert_why(found, Reason.CORRUPT)
        (decided,) = found["decided"]
        assert (decided["num_pages"], decided["num_found"]) == (USABLE, USABLE)
        assert decided["num_served"] < USABLE


def test_a_policy_that_does_not_wait(host: Shared, filled: Path) -> None:
    with (
        StoreProcess(filled) as store,
        contextlib.closing(Proxy(store.port)) as link,
        host.attached(link.url, policy="best_effort", **PATIENT) as server,
        ThreadPoolExecutor(MOST_RUNNING + 1) as pool,
    ):
        wait_until(partial(is_given_up, server, store, link, pool))
        assert_why(why(store, server, 0), Reason.POLICY)


MOST_RUNNING = 4  # --max-running-requests


def is_given_up(server: SGLangServer, store: StoreProcess, link: Proxy, pool: ThreadPoolExecutor) -> bool:
    """Let a stored prompt wait behind others until its fetch is under way. With `best_effort`, SGLang gives the fetch
    up when the prompt's turn comes."""
    link.set(Fault("hang", only=is_data))
    server.flush()
    sampling = {"max_new_tokens": 600, "temperature": 0.0, "ignore_eos": True}
    others = {}
    for i in range(MOST_RUNNING):
        body = {"input_ids": make_prompt(60 + i, 32), "rid": f"other {i}", "sampling_params": sampling}
        others[body["rid"]] = pool.submit(server.request, "POST", "/generate", body)
    wait_until(
        lambda: load_of(server)["num_running_reqs"] == MOST_RUNNING or any(each.done() for each in others.values())
    )
    waiting = begin(server, pool, 0, "waits")
    wait_until(lambda: link.is_asked_for_data() or waiting.done())
    for rid in others:
        server.request("POST", "/abort_request", {"rid": rid})
    for each in (*others.values(), waiting):
        with contextlib.suppress(ServerError):
            each.result(WAIT_S)
    link.set(None)
    return Reason.POLICY in reasons_in(why(store, server, 0))
