"""Whatever the store does, requests end in their deadline, with the answers they would have without a cache."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer
from harness.faults import Fault
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from tests.e2e.conftest import NUM_STORED, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import (
    DEADLINE_S,
    LOOKUP_S,
    SLACK_S,
    Proxy,
    assert_a_miss_in_time,
    assert_stored_once_the_store_works,
    each_fault,
    is_data,
    misses,
)
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def filled_store(filled: Path) -> Iterator[StoreProcess]:
    with StoreProcess(filled) as store:
        yield store


@pytest.fixture(scope="module")
def proxy(filled_store: StoreProcess) -> Iterator[Proxy]:
    proxy = Proxy(filled_store)
    yield proxy
    proxy.close()


@pytest.fixture(scope="class")
def reader(host: Shared, proxy: Proxy) -> Iterator[SGLangServer]:
    config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S, "lookup_timeout_s": LOOKUP_S}
    with host.attached(proxy.url, **config) as server:
        ask(server, make_prompt(NUM_STORED))  # warm
        yield server


class TestDeadline:
    @each_fault
    def test_a_store_that(
        self,
        seed: int,
        fault: Fault,
        stage: str,
        reasons: set[str],
        proxy: Proxy,
        reader: SGLangServer,
        expected: Expected,
    ) -> None:
        assert_a_miss_in_time(reader, proxy, seed, fault, stage, reasons, expected)


@pytest.mark.parametrize("mode", ["device", "host"])
def test_what_a_store_has_not_taken_is_stored_once_it_works(
    request: pytest.FixtureRequest, tmp_path: Path, mode: str
) -> None:
    """A system prompt stays in SGLang's tree, which offers it to the store once."""
    shared: Shared = request.getfixturevalue(mode)
    with (
        StoreProcess(tmp_path / "store") as store,
        closing(Proxy(store)) as link,
        shared.attached(link.url, fetch_timeout_s=600) as server,
    ):
        assert_stored_once_the_store_works(server, link)


def test_a_fetch_that_hangs_does_not_keep_the_cache_from_being_flushed(
    host: Shared, proxy: Proxy, expected: Expected
) -> None:
    """SGLang joins the fetching thread for 10 s when it flushes, and dies if it does not end."""
    proxy.set(Fault("hang", only=is_data))
    budget: dict[str, Any] = {"prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.2}
    with host.attached(proxy.url, policy="timeout", mode="read_only", fetch_timeout_s=60, **budget) as reader:
        assert same_answer(ask(reader, make_prompt(0)), expected[0])
        reader.flush()
        assert same_answer(ask(reader, make_prompt(1)), expected[1])


def test_one_byte_flipped_in_every_object(host: Shared, filled: Path, tmp_path: Path, expected: Expected) -> None:
    directory = tmp_path / "flipped"
    flipped = 0
    for path in filled.rglob("*.kv?"):
        data = bytearray(path.read_bytes())
        if path.suffix == ".kvd":
            data[len(data) // 2] ^= 1
            flipped += 1
        target = directory / path.relative_to(filled)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert flipped
    with StoreProcess(directory) as store, host.attached(store.url, mode="read_only") as reader:
        for seed in range(3):
            answer = ask(reader, make_prompt(seed))
            assert same_answer(answer, expected[seed])
        assert read_metric(reader.metrics(), "sgl_kvfetch_corrupt_chunks_total") >= 3


def test_flipped_manifests_are_misses(host: Shared, filled: Path, tmp_path: Path, expected: Expected) -> None:
    directory = tmp_path / "flipped"
    for path in filled.rglob("*.kv?"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 0x10
        target = directory / path.relative_to(filled)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    with StoreProcess(directory) as store, host.attached(store.url, mode="read_only") as reader:
        answer = ask(reader, make_prompt(0))
        assert from_storage(answer) == 0
        assert same_answer(answer, expected[0])


def test_a_store_killed_during_a_fetch(host: Shared, filled: Path, tmp_path: Path, expected: Expected) -> None:
    directory = shutil.copytree(filled, tmp_path / "copy", ignore=shutil.ignore_patterns(".served"))
    with StoreProcess(directory) as store:
        proxy = Proxy(store)
        proxy.set(Fault("stall", after_bytes=1000, only=is_data))  # the fetch is under way when the store dies
        config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S}
        try:
            with host.attached(proxy.url, **config) as reader:
                ask(reader, make_prompt(NUM_STORED))

                def kill() -> None:
                    proxy.wait_for_data()
                    store.kill()
                    proxy.set(Fault("refuse"))

                killer = threading.Thread(target=kill)
                killer.start()
                with misses(reader, "fetch", {"refused", "truncated", "timeout"}):
                    started_s = time.monotonic()
                    answer = ask(reader, make_prompt(0))
                    took_s = time.monotonic() - started_s
                killer.join()
                assert same_answer(answer, expected[0])
                assert from_storage(answer) < 640
                assert took_s < DEADLINE_S + SLACK_S
                # The next request does not wait for a store that is gone.
                answer = ask(reader, make_prompt(1))
                assert same_answer(answer, expected[1])
        finally:
            proxy.close()
