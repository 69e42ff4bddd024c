"""Two servers that read one store, one in host mode and one in device mode: SGLang's own router in front of them, and
what SGLang's KV events tell routers of what is fetched (docs/stores.md)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from harness.children import start_child
from harness.engine import SGLangServer, free_port
from harness.metrics import wait_until_written, written, written_pages
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, polls, wait_until
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PAGES = 640 // PAGE_SIZE
# As `python -m sglang_router.launch_router`, which imports all of SGLang for a router of another kind.
ROUTER = """
import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()
"""
needs_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="needs SGLang's router: pip install sglang-router"
)


class Events:
    """Subscribes to a server's KV events."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._seen: list[dict[str, Any]] = []

    def arrived(self) -> list[dict[str, Any]]:
        """Return all events until now, in their order."""
        while self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            self._seen += msgspec.msgpack.decode(payload)[1]
        return self._seen

    def stored_after_the_last_flush(self) -> dict[str, list[int]]:
        """Return the tokens that were stored, in their order, by medium."""
        found: dict[str, list[int]] = {}
        for event in self.arrived():
            if event["type"] == "AllBlocksCleared":
                found = {}
            elif event["type"] == "BlockStored":
                found.setdefault(event["medium"], []).extend(event["token_ids"])
        return found

    def close(self) -> None:
        self._socket.close(0)


class Pair(NamedTuple):
    host: SGLangServer
    device: SGLangServer
    events: dict[str, Events]  # by mode


@pytest.fixture(scope="module")
def pair(host: Shared, device: Shared, expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with (
        StoreProcess(tmp_path_factory.mktemp("routers") / "store") as store,
        host.attached(store.url) as one,
        device.attached(store.url) as other,
        closing(Events(host.events_url)) as of_one,
        closing(Events(device.events_url)) as of_other,
    ):
        yield Pair(one, other, {"host": of_one, "device": of_other})


@pytest.mark.parametrize(("mode", "media"), [("host", {"CPU_PINNED", "GPU"}), ("device", {"GPU"})])
def test_kv_events_say_what_is_fetched(pair: Pair, expected: Expected, mode: str, media: set[str]) -> None:
    """A router that follows them knows that the server has the prefix now, and in which memory."""
    server, events = getattr(pair, mode), pair.events[mode]
    seed = 2 if mode == "host" else 3
    prompt = make_prompt(seed)
    for number in range(100):  # the first events are lost until the subscription has reached the server
        if events.arrived():
            break
        ask(server, make_prompt(1000 + number, 32))
    with written(server, PAGES):
        ask(server, prompt)
    server.flush()
    answer = ask(server, prompt)
    fetched = from_storage(answer)
    assert fetched >= 0.9 * len(prompt)
    assert same_answer(answer, expected[seed])

    def has_all() -> bool:
        stored = events.stored_after_the_last_flush()
        return all(prompt[:fetched] == stored.get(medium, [])[:fetched] for medium in media)

    wait_until(has_all, found=lambda: {k: len(v) for k, v in events.stored_after_the_last_flush().items()})
    assert set(events.stored_after_the_last_flush()) == media | ({"CPU_PINNED"} if mode == "host" else set())


class Router:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, text: str) -> dict[str, Any]:
        """Return an answer's meta_info, and the text as `text`."""
        body = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}}
        answer = self._request("POST", "/generate", body)
        return {**answer["meta_info"], "text": answer["text"]}

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._request("GET", "/workers")["workers"]
        return found

    def remove(self, url: str) -> None:
        (worker,) = (worker for worker in self.workers() if worker["url"] == url)
        self._request("DELETE", f"/workers/{worker['id']}")
        wait_until(lambda: url not in {worker["url"] for worker in self.workers()})

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            content = response.read()
        return json.loads(content) if content else None


@contextmanager
def routing(pair: Pair, folder: Path, policy: str) -> Iterator[Router]:
    port, metrics_port = free_port(), free_port()
    command = [
        *(sys.executable, "-c", ROUTER, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"),
        *("--policy", policy, "--worker-urls", pair.host.url, pair.device.url),
    ]
    log = folder / "router.log"
    with log.open("w") as output:
        process = start_child(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    router = Router(f"http://127.0.0.1:{port}")
    try:
        for _ in polls(poll_s=0.2):
            assert process.poll() is None, log.read_text()
            try:
                if len([worker for worker in router.workers() if worker["is_healthy"]]) == 2:
                    break
            except OSError:
                pass  # it does not listen yet
        yield router
    finally:
        process.kill()
        process.wait()


def text_of(seed: int) -> str:
    return " ".join(f"w{token}" for token in make_prompt(seed))


def num_served(server: SGLangServer) -> int:
    return server.log().count('"POST /generate HTTP')


def who_served(pair: Pair, router: Router, text: str) -> tuple[SGLangServer, dict[str, Any]]:
    before = num_served(pair.host)
    answer = router.ask(text)
    return (pair.host if num_served(pair.host) > before else pair.device), answer


def compute_and_store(pair: Pair, router: Router, text: str) -> tuple[SGLangServer, dict[str, Any]]:
    """Return the server that computed a new prompt, once it has stored it, and its answer."""
    before = {server.url: written_pages(server) for server in (pair.host, pair.device)}
    server, answer = who_served(pair, router, text)
    assert answer["cached_tokens"] == 0
    wait_until_written(server, before[server.url] + PAGES)
    return server, answer


def assert_fetched(answer: dict[str, Any], computed: dict[str, Any]) -> None:
    assert answer["cached_tokens_details"]["storage"] >= 0.9 * answer["prompt_tokens"]
    assert answer["text"] == computed["text"]


@needs_router
def test_cache_aware_routing_finds_memory_and_the_store_serves_the_rest(pair: Pair, tmp_path: Path) -> None:
    text = text_of(10)
    with routing(pair, tmp_path, "cache_aware") as router:
        first, computed = compute_and_store(pair, router, text)
        for _ in range(3):  # in that server's memory: it gets all of them
            again, answer = who_served(pair, router, text)
            assert again is first
            assert answer["cached_tokens_details"]["device"] > 0
        router.remove(first.url)  # as when it is drained, or overloaded
        other, fetched = who_served(pair, router, text)
    assert other is not first
    assert_fetched(fetched, computed)
