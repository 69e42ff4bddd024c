"""Two ranks in device mode: what befalls one of them befalls both, and never hangs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine import Generation, ServerError, SGLangServer, device_args
from harness.faults import Fault
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.stores.wire import Route
from tests.e2e.conftest import ask, from_storage, make_prompt, same_answer
from tests.e2e.device import attached, begin, wait_until_disconnected
from tests.e2e.faults import PAGES, SLACK_S, Proxy, fetch_again, is_data, misses
from tests.e2e.shared import attach, detach

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

DEADLINE_S = 2.0
CONFIG: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S}
RANKS = ["--tp-size", "2"]
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass(frozen=True)
class Pair:
    """A server of two ranks, which has stored two prompts, and keeps nothing of them itself."""

    server: SGLangServer
    link: Proxy
    store: StoreProcess
    computed: list[Generation]

    def data_of(self, rank: int) -> Callable[[str, str], bool]:
        """Whether a request is for data of one of the ranks: either; they are told apart by their namespaces."""
        namespaces = sorted(path.name for path in self.store.directory.iterdir() if any(path.glob("**/*.kvd")))
        assert len(namespaces) == 2, namespaces
        return lambda method, path: is_data(method, path) and namespaces[rank] in path

    def fetch_again(self) -> None:
        """All is well again."""
        assert same_answer(fetch_again(self.server, 0), self.computed[0])


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with StoreProcess(tmp_path_factory.mktemp("ranks") / "store") as store:
        link = Proxy(store)
        try:
            flags = [*device_args(store.url), *RANKS]
            with SGLangServer(model, extra_args=flags, env=ENV, admin_api_key="admin") as server:
                computed = [ask(server, make_prompt(seed)) for seed in range(2)]
                assert [from_storage(answer) for answer in computed] == [0, 0]
                wait_until_written(server, 2 * 2 * PAGES)
                server.flush()
                detach(server)
                attach(server, link.url, **CONFIG)
                yield Pair(server, link, store, computed)
        finally:
            link.close()


def test_what_two_ranks_wrote_comes_back(pair: Pair) -> None:
    for seed in range(2):
        assert same_answer(fetch_again(pair.server, seed), pair.computed[seed])


@pytest.mark.parametrize(
    ("rank", "fault", "reasons"),
    [
        (0, Fault("hang"), {"timeout"}),
        (1, Fault("slow", bytes_per_s=2e3), {"timeout"}),
        (1, Fault("garbage"), {"protocol", "truncated", "timeout"}),
        (0, Fault("close"), {"truncated", "refused", "timeout"}),
        (1, Fault("flip", after_bytes=500), {"corrupt"}),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_store_that_fails_one_of_them(pair: Pair, rank: int, fault: Fault, reasons: set[str]) -> None:
    reasons = {*reasons, "timeout", "late", "no_slots"}  # on a busy machine the deadline may come before the fault
    pair.server.flush()
    with misses(pair.server, "fetch", reasons):
        pair.link.set(replace(fault, only=pair.data_of(rank)))
        started_s = time.monotonic()
        answer = ask(pair.server, make_prompt(1))
        took_s = time.monotonic() - started_s
        pair.link.set(None)
    assert same_answer(answer, pair.computed[1])
    assert from_storage(answer) < 640 // 2
    assert took_s < DEADLINE_S + SLACK_S
    pair.fetch_again()


def test_a_lookup_that_one_of_them_is_refused(pair: Pair) -> None:
    def is_refused() -> bool:
        pair.server.flush()
        pair.link.set(Fault("error", status=400, times=1, only=lambda _, path: path == Route.LOOKUP))
        answer = ask(pair.server, make_prompt(1))
        assert same_answer(answer, pair.computed[1])
        return from_storage(answer) == 0

    with misses(pair.server, "lookup", {"invalid"}):
        wait_until(is_refused)  # a client whose answer is late asks twice, and may take the second answer
    pair.link.set(None)
    pair.fetch_again()


def test_an_abort_and_a_detach_while_one_of_them_hangs(pair: Pair, tmp_path: Path) -> None:
    pair.server.flush()
    pair.link.set(Fault("hang", only=pair.data_of(1)))
    with ThreadPoolExecutor(1) as pool:
        parked = begin(pair.server, pool, 0, "parked")
        pair.link.wait_for_data()
        pair.server.request("POST", "/abort_request", {"rid": "parked"})
        with contextlib.suppress(ServerError):
            parked.result(WAIT_S)
    assert "detached" in detach(pair.server)
    wait_until_disconnected(pair.link.url)  # the other rank may be a little later
    answer = ask(pair.server, make_prompt(1))
    assert from_storage(answer) == 0
    assert same_answer(answer, pair.computed[1])
    with pytest.raises(ServerError, match="codek"):
        attach(pair.server, pair.link.url, codek="hevc")
    assert attached(pair.server) is None
    pair.link.set(None)
    attach(pair.server, pair.link.url, **CONFIG)
    pair.fetch_again()


def test_shutdown_while_a_request_is_parked(pair: Pair) -> None:
    """SGLang lets the requests that it has end first, and this one ends with its fetch's deadline."""
    pair.server.flush()
    pair.link.set(Fault("hang", only=pair.data_of(0)))
    with ThreadPoolExecutor(1) as pool:
        parked = begin(pair.server, pool, 0, "parked")
        pair.link.wait_for_data()
        pair.server.stop()
        assert json.loads(parked.result(WAIT_S))["output_ids"] == pair.computed[0].output_ids[:4]
