"""What tests of failing stores have in common: the link that fails, and what must follow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from harness.engine import Generation, SGLangServer
from harness.faults import Fault, FaultyProxy
from harness.metrics import read_metric, wait_until_written, written
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, assert_computed, from_storage, make_prompt
from tests.tools.conftest import kvfetch

PAGES = 640 // PAGE_SIZE
DEADLINE_S = LOOKUP_S = 5.0  # of a fetch and of a lookup: a busy machine stands still for seconds
SLACK_S = WAIT_S / 2  # the lookup's own deadline, the prefill, and a machine that has much else to do


class Proxy:
    """A FaultyProxy, on a thread of its own, in front of a port of this machine."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._proxy = FaultyProxy("127.0.0.1", port)
        self._run(self._proxy.__aenter__())
        self.url = self._proxy.url

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def set(self, fault: Fault | None) -> None:
        async def begin() -> None:
            self._proxy.requests.clear()  # in one step of the loop: each later request meets the fault
            await self._proxy.set(fault)

        self._run(begin())

    def reset(self) -> None:
        """Reset all connections. Those that are made after that work."""
        self.set(Fault("refuse"))
        self.set(None)

    def is_asked_for_data(self) -> bool:
        """Return whether a reader has asked for data since the last `set`."""
        return any(is_data(*request) for request in list(self._proxy.requests))

    def wait_for_data(self) -> None:
        wait_until(self.is_asked_for_data)

    def close(self) -> None:
        self._run(self._proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


def is_data(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".kvd")


def is_write(method: str, path: str) -> bool:
    return method == "PUT"


def counted(server: SGLangServer, stage: str, reasons: set[str]) -> float:
    text = server.metrics()
    return sum(read_metric(text, "sgl_kvfetch_misses_total", stage=stage, reason=reason) for reason in reasons)


@contextlib.contextmanager
def misses(server: SGLangServer, stage: str, reasons: set[str]) -> Iterator[None]:
    """Wait at the block's end until the server has counted a miss of the block under one of the reasons: it may do so
    a moment after its answer, as another rank may."""
    before = counted(server, stage, reasons)
    yield
    wait_until(lambda: counted(server, stage, reasons) > before, poll_s=0.1, found=server.log_tail)


def compute_and_store(server: SGLangServer, expected: Expected, num_prompts: int = 2) -> None:
    """Have the server compute the first prompts, and wait until all their pages are stored."""
    for seed in range(num_prompts):
        assert_computed(server, seed, expected[seed])
    wait_until_written(server, num_prompts * PAGES)
    assert read_metric(server.metrics(), "sgl_kvfetch_written_pages_total", result="stored") == num_prompts * PAGES


def fetch_again(server: SGLangServer, seed: int) -> Generation:
    """All is well again, once the pause after failed lookups is over: up to 30 s."""
    answers: list[Generation] = []

    def is_fetched() -> bool:
        server.flush()
        answers.append(ask(server, make_prompt(seed)))
        return from_storage(answers[-1]) >= 0.9 * 640

    wait_until(is_fetched, timeout_s=2 * WAIT_S, poll_s=0.5, found=lambda: f"{answers[-1]}\n{server.log_tail()}")
    return answers[-1]


def assert_stored_once_the_store_works(server: SGLangServer, link: Proxy, num_ranks: int = 1) -> None:
    """Let a store fail to take a prompt that stays in SGLang's tree, which offers it once, and then work again.
    ``num_ranks``: how many write pages of their own."""
    prompt, system_tokens = make_prompt(20), 320

    def has_lost_pages() -> bool:
        lost = read_metric(server.metrics(), "sgl_kvfetch_written_pages_total", result="dropped_error")
        return lost >= num_ranks * system_tokens // PAGE_SIZE

    endings = itertools.count(30)

    def is_stored() -> bool:
        # The engine hears that the store works a moment after it does. It writes again once it stores anything behind.
        ask(server, prompt[:system_tokens] + make_prompt(next(endings), 5 * PAGE_SIZE))
        answer = kvfetch("why", link.url, "--server", server.url, "--prompt", str(prompt), "--json")
        return bool(json.loads(answer.stdout)[0]["stored_pages"] == PAGES)

    link.set(Fault("error", only=is_write))
    ask(server, prompt[:system_tokens])
    wait_until(has_lost_pages)
    link.reset()
    with written(server, num_ranks * PAGES):
        ask(server, make_prompt(21))
    for end in range(system_tokens + 5 * PAGE_SIZE, len(prompt) + 1, 5 * PAGE_SIZE):
        ask(server, prompt[:end])
    wait_until(is_stored)
    server.flush()
    assert from_storage(ask(server, prompt)) == len(prompt) - PAGE_SIZE  # the last token is always computed
