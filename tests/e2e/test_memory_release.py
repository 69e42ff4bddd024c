"""SGLang gives its pool's memory up, and takes it again: `--enable-memory-saver`, on the CPU engine."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from harness.engine import SGLangServer, device_args
from harness.faults import Fault
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from tests.e2e.conftest import ask, make_prompt, same_answer
from tests.e2e.device import begin, wait_until_parked
from tests.e2e.faults import PAGES, Proxy, is_data, is_write

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="takes the memory of a pool on the CPU away"),
]

# The package `torch_memory_saver` needs a GPU. This one takes the pool's memory away from the process: an access ends
# it with SIGSEGV.
SAVER = """
import ctypes, mmap, sys
from contextlib import nullcontext

_libc = ctypes.CDLL(None, use_errno=True)
_NONE, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE


def _protect(protection):
    frame = sys._getframe()
    while not frame.f_code.co_name.endswith("_memory_occupation"):
        frame = frame.f_back
    pool = frame.f_locals["self"].scheduler.tree_cache.token_to_kv_pool_allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        first = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (buffer.data_ptr() + buffer.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        assert first < end and _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), protection) == 0


class _Saver:
    enabled = True

    def region(self, tag, enable_cpu_backup=False):
        return nullcontext()

    def cuda_graph(self, **kwargs):
        return nullcontext()

    def disable(self):
        return nullcontext()

    def pause(self, tag):
        _protect(_NONE)

    def resume(self, tag):
        _protect(_ALL)


torch_memory_saver = _Saver()


def configure_subprocess():
    return nullcontext()
"""


def release_and_resume(server: SGLangServer) -> None:
    """Give the pool's memory up for a second, in which nothing may use it, and take it again."""
    server.request("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
    time.sleep(1)
    server.request("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})


def test_fetches_and_copies_end_before_the_memory_goes(model: Path, store: StoreProcess, tmp_path: Path) -> None:
    """SGLang refuses to give memory up while anything is under way, with an assertion that ends the server."""
    (tmp_path / "torch_memory_saver.py").write_text(SAVER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with closing(Proxy(store.port)) as link:
        args = [*device_args(link.url, fetch_timeout_s=600, write_queue_bytes=8 << 20), "--enable-memory-saver"]
        with SGLangServer(model, extra_args=args, env={"PYTHONPATH": path}) as server:
            answers = [ask(server, make_prompt(seed)) for seed in range(4, 6)]
            wait_until_written(server, 2 * PAGES)
            server.flush()
            link.set(Fault("hang", only=is_data))
            with ThreadPoolExecutor(1) as pool:
                parked = begin(server, pool, 4, "parked")
                wait_until_parked(server, 1)
                link.wait_for_data()
                server.request("POST", "/pause_generation", {"mode": "retract"})
                release_and_resume(server)
                link.reset()
                server.request("POST", "/continue_generation", {})
                assert json.loads(parked.result(WAIT_S))["output_ids"] == answers[0].output_ids[:4]
            assert same_answer(ask(server, make_prompt(5)), answers[1])

            link.set(Fault("hang", only=is_write))  # so that copies wait for room
            answers = [ask(server, make_prompt(seed)) for seed in range(6, 12)]
            release_and_resume(server)
            link.reset()
            assert same_answer(ask(server, make_prompt(6)), answers[0])
