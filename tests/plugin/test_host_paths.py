"""Tests through how many modules a page passes in host mode, and on which threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.plugin.backends import DIM, HEADS, PAGE_SIZE, POOL_PAGES, Make, after, keys, make_pool, tokens
from tests.plugin.paths import modules_run, require_drawn
from tests.plugin.planes import Served
from tests.test_threads import assert_threads

pytestmark = pytest.mark.process


def test_the_path_of_a_page_to_the_host_pool(make: Make, served: Served, tmp_path: Path) -> None:
    buffers = torch.randn(2, POOL_PAGES, 1, PAGE_SIZE, HEADS, DIM)
    pool, before = make_pool(layer_num=1, target_layer_num=1, kv_buffer=tuple(buffers)), threading.enumerate()
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
        # The data plane has its threads here: all of a write's, a lookup's and a fetch's have run.
        assert_threads(before, {"kvfetch", *(f"kvfetch-{name}" for name in ("data", "segment", "encode", "decode"))})
        backend.close()
    require_drawn("to the host pool", modules)
