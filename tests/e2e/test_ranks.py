"""Servers of two ranks: they read what servers of one rank wrote, and the other way round; and what befalls one of them
befalls both, and never hangs. Of a model with MLA, and of pipeline stages, too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.attaching import attach, detach
from harness.engine import Generation, ServerError, SGLangServer, device_args, hicache_args, host_tier_args
from harness.faults import Fault
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_deepseek
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from tests.e2e.conftest import (
    PAGE_SIZE,
    Expected,
    ask,
    assert_computed,
    assert_fetched,
    from_storage,
    make_prompt,
    same_answer,
)
from tests.e2e.device import begin, wait_until_disconnected
from tests.e2e.faults import (
    PAGES,
    SLACK_S,
    Proxy,
    assert_stored_once_the_store_works,
    fetch_again,
    is_data,
    misses,
)
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

DEADLINE_S = 2.0
CONFIG: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S}
RANKS = ["--tp-size", "2"]
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def host_ranks(model: Path) -> Iterator[Shared]:
    with closing(Shared(model, [*host_tier_args(), *RANKS], "wait_complete", ENV)) as shared:
        yield shared


@pytest.fixture(scope="module")
def device_ranks(model: Path) -> Iterator[Shared]:
    with closing(Shared(model, [*device_args("http://nowhere"), *RANKS], None, ENV)) as shared:
        yield shared


@pytest.mark.parametrize("mode", ["host", "device"])
def test_ranks_read_their_heads_of_what_others_wrote(
    mode: str, store: StoreProcess, expected: Expected, request: pytest.FixtureRequest
) -> None:
    config: dict[str, Any] = {"quantiser": "exact", "codec": "zstd", "lookup_timeout_s": 20}
    one_rank: Shared = request.getfixturevalue(mode)
    two_ranks: Shared = request.getfixturevalue(f"{mode}_ranks")

    with one_rank.attached(store.url, **config) as one:
        assert from_storage(ask(one, make_prompt(0))) == 0
        wait_until_written(one, PAGES)
        raw_bytes = read_metric(one.metrics(), "sgl_kvfetch_wire_bytes_total", direction="write")

    with two_ranks.attached(store.url, **config) as two:
        assert_fetched(two, 0, expected[0])
        # Both ranks together have read each byte once.
        assert read_metric(two.metrics(), "sgl_kvfetch_wire_bytes_total", direction="read") <= raw_bytes
        assert_computed(two, 1, expected[1])
        wait_until_written(two, 2 * PAGES)
        # A prefix of which each TP size has written a part.
        ask(two, make_prompt(0) + make_prompt(2, 320))
        wait_until_written(two, 2 * (PAGES + 320 // PAGE_SIZE))
        two.flush()
        assert_fetched(two, 1, expected[1])

    with one_rank.attached(store.url, **config) as one:
        assert_fetched(one, 1, expected[1])
        answer = ask(one, make_prompt(0) + make_prompt(2, 320))
        assert from_storage(answer) >= 0.9 * 960
        assert read_metric(one.metrics(), "sgl_kvfetch_misses_total") == 0


def test_what_two_stages_store_they_restore(model: Path, store: StoreProcess) -> None:
    """Each its own layers."""
    with (
        closing(Proxy(store.port)) as link,
        SGLangServer(
            model, extra_args=[*hicache_args(link.url, fetch_timeout_s=600), "--pp-size", "2"], env=ENV
        ) as server,
    ):
        computed = ask(server, make_prompt(0))
        wait_until_written(server, 2 * 640 // PAGE_SIZE)
        server.flush()
        ask(server, make_prompt(1))  # in the same slots, of which nothing is left
        wait_until_written(server, 2 * 2 * 640 // PAGE_SIZE)
        server.flush()
        assert_fetched(server, 0, computed)
        assert_stored_once_the_store_works(server, link, num_ranks=2)
    assert len({path.parent for path in store.directory.rglob("*.kvm")}) == 2


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def one_rank(deepseek: Path) -> Iterator[Shared]:
    """A server of a model with MLA, for host mode."""
    with closing(Shared(deepseek, host_tier_args(), "wait_complete")) as shared:
        yield shared


def test_latent_vectors_are_stored_once_for_servers_of_any_size(
    deepseek: Path, one_rank: Shared, store: StoreProcess
) -> None:
    """Every rank has the same ones. Across modes, too."""
    with one_rank.attached(store.url) as server:
        computed = [_compute(server, 0)]
    flags = device_args(store.url)
    with SGLangServer(deepseek, extra_args=[*flags, *RANKS], env=ENV) as server:
        assert_fetched(server, 0, computed[0])
        computed.append(_compute(server, 1))
        assert read_metric(server.metrics(), "sgl_kvfetch_written_pages_total", result="stored") == PAGES
        server.flush()
        assert_fetched(server, 1, computed[1])
    with one_rank.attached(store.url) as server:
        assert_fetched(server, 0, computed[0])
        assert_fetched(server, 1, computed[1])


def _compute(server: SGLangServer, seed: int) -> Generation:
    answer = ask(server, make_prompt(seed))
    assert from_storage(answer) == 0
    wait_until_written(server, PAGES)
    return answer


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
def pair(device_ranks: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """From here on to the last test, which ends the server."""
    with StoreProcess(tmp_path_factory.mktemp("ranks") / "store") as store, closing(Proxy(store.port)) as link:
        with device_ranks.attached(store.url) as server:
            computed = [ask(server, make_prompt(seed)) for seed in range(2)]
            assert [from_storage(answer) for answer in computed] == [0, 0]
            wait_until_written(server, 2 * 2 * PAGES)
        with device_ranks.detached() as server:
            attach(server, link.url, **CONFIG)
            yield Pair(server, link, store, computed)


@pytest.mark.parametrize(
    ("rank", "fault", "reasons"),
    [
        (0, Fault("hang"), {"timeout"}),
        (0, Fault("garbage"), {"protocol", "truncated", "timeout"}),
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
    assert_computed(pair.server, 1, pair.computed[1])
    with pytest.raises(ServerError, match="codek"):
        attach(pair.server, pair.link.url, codek="hevc")
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
