"""A model with sliding windows, which keeps some layers' pages in a side pool, on real SGLang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_mellum
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import decode_manifest
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.device import on_the_gpu_path
from tests.e2e.faults import fetch_again

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 640
WINDOW = 64


@pytest.fixture(scope="module")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mellum(tmp_path_factory.mktemp("mellum"), WINDOW)


@pytest.mark.parametrize("mode", ["host", "on the GPU path"])
def test_windows_are_stored_and_restored_with_their_prefixes(
    mode: str, mellum: Path, store: StoreProcess, tmp_path: Path
) -> None:
    mode_args: Callable[[str], list[str]] = hicache_args if mode == "host" else device_args
    env = on_the_gpu_path(tmp_path / "gpu") if mode == "on the GPU path" else {}
    with SGLangServer(mellum, extra_args=mode_args(store.url), env=env) as server:
        assert ("of scratch memory on the GPU" in server.log()) == (mode == "on the GPU path")
        computed = [ask(server, make_prompt(seed)) for seed in range(2)]
        assert not any(map(from_storage, computed))
        wait_until_written(server, 2 * TOKENS // PAGE_SIZE)
        server.flush()
        restored = ask(server, make_prompt(0))
        assert from_storage(restored) >= 0.9 * TOKENS
        assert same_answer(restored, computed[0])
        _flip_side_pages(store)
        answer = ask(server, make_prompt(1))
        assert from_storage(answer) == 0  # KV without its window is never used
        assert same_answer(answer, computed[1])
        assert read_metric(server.metrics(), "sgl_kvfetch_corrupt_chunks_total") > 0
        assert same_answer(fetch_again(server, 1), computed[1])  # it is stored again


def _flip_side_pages(store: StoreProcess) -> None:
    """Flip a bit in the middle of each object of side pages."""
    for path in store.directory.rglob("*.kvm"):
        manifest = decode_manifest(path.read_bytes())
        for side in manifest.sides:
            data = store.directory / manifest.data_name(side)
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
