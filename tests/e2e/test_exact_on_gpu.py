"""Cells of `exact` stay coded until they are in the pool, where every bit is what was written: real SGLang, on a device
that stands in for a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.children import data_planes
from harness.engine import SGLangServer, device_args
from harness.metrics import wait_until_written
from harness.stand_in_gpu import RESTORED, on_the_gpu_path, pages_compared
from harness.store_process import StoreProcess
from tests.e2e.conftest import Expected, ask, assert_computed, make_prompt, same_answer
from tests.e2e.device import assert_fetched_in_parts
from tests.e2e.faults import PAGES, fetch_again

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_coded_cells_give_the_answers_of_an_engine_without_a_cache(
    model: Path, store: StoreProcess, expected: Expected, tmp_path: Path
) -> None:
    env = on_the_gpu_path(tmp_path / "gpu", restores=True)
    args = device_args(store.url, memory_cache="64MiB")
    with SGLangServer(model, extra_args=args, env=env) as server:
        for seed in range(2):
            assert same_answer(ask(server, make_prompt(seed)), expected[seed])
        wait_until_written(server, 2 * PAGES)
        assert_fetched_in_parts(server, expected)
        assert RESTORED in server.log()

        (plane,) = data_planes()
        os.kill(plane, signal.SIGKILL)
        server.flush()
        assert same_answer(fetch_again(server, 0), expected[0])

        _flip_bits(store)
        server.flush()
        assert_computed(server, 1, expected[1])
        num_loaded, num_same = pages_compared(server.log())
        assert num_same == num_loaded > 2 * PAGES  # of three hits, and of half a one


def _flip_bits(store: StoreProcess) -> None:
    """Flip a bit in the middle of each data object."""
    for path in store.directory.rglob("*.kvd"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
