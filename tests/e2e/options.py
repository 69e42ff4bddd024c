"""What SGLang's options for HiCache do with us, on a real server: the table in docs/configuration.md. And what a
release of SGLang stored comes back after a restart, and to servers of the environment's own release.

``scripts/test --sglang VERSION`` runs this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.plugin.versions import WITH_LINKER, installed_version
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, assert_fetched, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES, compute_and_store

pytestmark = pytest.mark.sglang

HIT = 624  # SGLang always computes the last token, and fetches whole pages


@pytest.mark.parametrize(
    "flags",
    [
        ["--hicache-write-policy", "write_through_selective"],
        ["--hicache-mem-layout", "layer_first", "--hicache-io-backend", "kernel"],
        ["--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"],
        ["--hicache-mem-layout", "page_head", "--hicache-io-backend", "kernel"],
        ["--hicache-host-memory-mode", "buffer_only"],
        ["--hicache-host-memory-mode", "buffer_only", "--hicache-write-policy", "write_back"],
        ["--hicache-size", "0", "--hicache-ratio", "1.5"],
        ["--hicache-size", "0", "--hicache-host-memory-fraction", "0.2"],
        [
            *("--hicache-storage-prefetch-retry-poll-interval", "0"),
            *("--hicache-storage-prefetch-retry-max-attempts", "0"),
        ],
    ],
    ids=" ".join,
)
def test_pages_are_stored_and_fetched(model: Path, store: StoreProcess, expected: Expected, flags: list[str]) -> None:
    with SGLangServer(model, extra_args=[*hicache_args(store.url), *flags]) as server:
        ask(server, make_prompt(0))
        ask(server, make_prompt(0))  # `write_through_selective` writes what was used twice
        wait_until_written(server, PAGES)
        server.flush()
        answer = ask(server, make_prompt(0))
        assert from_storage(answer) == HIT
        assert same_answer(answer, expected[0])


@pytest.mark.parametrize(
    ("policy", "num_stored"), [("write_through", HIT - 256), ("write_through_selective", 0), ("write_back", 0)]
)
def test_a_prompt_whose_beginning_is_on_the_device(
    model: Path, store: StoreProcess, expected: Expected, policy: str, num_stored: int
) -> None:
    """Its rest is looked up only if the beginning is in the host pool, too."""
    flags = [*hicache_args(store.url), "--hicache-write-policy", policy]
    with SGLangServer(model, extra_args=flags) as server:
        ask(server, make_prompt(0)[:257])  # computed: the store is empty
        with SGLangServer(model, extra_args=hicache_args(store.url)) as writer:
            ask(writer, make_prompt(0))
            wait_until_written(writer, PAGES - 256 // PAGE_SIZE)  # the other server may have written the beginning
        answer = ask(server, make_prompt(0))
        assert answer.cached_tokens == 256 + num_stored
        assert from_storage(answer) == num_stored
        assert same_answer(answer, expected[0])
        assert ("write_through, SGLang's default, does both" in server.log()) is (policy == "write_back")


MODES = {"host": hicache_args} | ({"device": device_args} if installed_version() in WITH_LINKER else {})


@pytest.mark.parametrize("args", MODES.values(), ids=MODES)
def test_what_it_stored_comes_back(
    model: Path, store: StoreProcess, expected: Expected, args: Callable[[str], list[str]]
) -> None:
    flags = args(store.url)
    with SGLangServer(model, extra_args=flags) as writer:
        assert json.loads(writer.request("GET", "/server_info"))["version"] == installed_version()
        compute_and_store(writer, expected, 1)
    for path in (os.environ.get("PYTHONPATH", ""), ""):
        with SGLangServer(model, extra_args=flags, env={"PYTHONPATH": path}) as reader:
            assert_fetched(reader, 0, expected[0])
