"""Tests how often a request's work passes from one thread or process to another in host mode, and on which threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.handovers import hand_overs, require_equal
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.plugin.backends import DIM, HEADS, PAGE_SIZE, POOL_PAGES, Make, after, keys, make_pool, tokens
from tests.plugin.paths import modules_run, require_drawn
from tests.plugin.planes import Served
from tests.test_threads import assert_threads

pytestmark = pytest.mark.process


def test_hand_overs_of_a_lookup_and_a_fetch_of_one_cell(make: Make, served: Served, tmp_path: Path) -> None:
    before = threading.enumerate()
    buffers = torch.randn(2, POOL_PAGES, 1, PAGE_SIZE, HEADS, DIM)
    pool = make_pool(layer_num=1, target_layer_num=1, kv_buffer=tuple(buffers))
    with StoreProcess(tmp_path / "store") as store, hand_overs() as seen:
        backend = make(pool, store=store.url, max_tp_size=1)
        # Not `store_pages`, which looks them up: what a lookup finds is read ahead, on a slow machine until later.
        assert backend.batch_set_v1(keys(8), tokens(list(range(8))), after([])) == [True] * 8
        wait_until(lambda: any(store.directory.rglob("*.kvm")))
        served.wait_until_idle()
        seen.clear()
        assert backend.batch_exists(keys(8)) == 8
        assert backend.batch_get_v1(keys(8), tokens(list(range(8, 16)))) == [True] * 8
        require_equal(
            seen,
            [
                "SGLang -> event loop: LookUp",
                "event loop -> kvfetch-data: Found",
                "kvfetch-data -> SGLang: Found, by a future",
                "SGLang -> event loop: FetchPages",
                "event loop -> kvfetch-receive: _Connection.run",
                "kvfetch-receive -> event loop: _chain_future._set_state",
                "event loop -> kvfetch-decode: DecodePool._run",
                "kvfetch-decode -> event loop: Fetcher._decode.end",
                "event loop -> kvfetch-data: Fetched",
                "kvfetch-data -> SGLang: Fetched, by a future",
            ],
        )
        # The data plane has its threads here: all of a write's, a lookup's and a fetch's have run.
        assert_threads(before, {"kvfetch", *(f"kvfetch-{name}" for name in ("data", "segment", "encode", "decode"))})
        backend.close()


def test_the_path_of_a_page_to_the_host_pool(make: Make, served: Served, tmp_path: Path) -> None:
    buffers = torch.randn(2, POOL_PAGES, 1, PAGE_SIZE, HEADS, DIM)
    pool = make_pool(layer_num=1, target_layer_num=1, kv_buffer=tuple(buffers))
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        backend = make(pool, store=store.url, max_tp_size=1)
        assert backend.batch_set_v1(keys(8), tokens(list(range(8))), after([])) == [True] * 8
        wait_until(lambda: any(store.directory.rglob("*.kvm")))
        for _ in range(2):
            served.wait_until_idle()
            seen.clear()
            assert backend.batch_exists(keys(8)) == 8
            assert backend.batch_get_v1(keys(8), tokens(list(range(8, 16)))) == [True] * 8
        modules = set(seen)
        backend.close()
    require_drawn("to the host pool", modules)
