"""A model with sliding windows, which keeps some layers' pages in a side pool, on real SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.engine import device_args, host_tier_args
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_mellum
from harness.stand_in_gpu import on_the_gpu_path
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import decode_manifest
from tests.e2e.conftest import PAGE_SIZE, ask, assert_computed, assert_fetched, from_storage, make_prompt, same_answer
from tests.e2e.continuation import calibrated, goes_on_in_both_modes
from tests.e2e.faults import fetch_again
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 640
WINDOW = 64


@pytest.fixture(scope="module")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mellum(tmp_path_factory.mktemp("mellum") / "model", WINDOW)


@pytest.fixture(scope="module")
def servers(mellum: Path) -> Iterator[dict[str, Shared]]:
    """One for each mode. The pools of that in device mode are treated as a GPU's."""
    of_gpu = on_the_gpu_path(mellum.with_name("gpu"))
    with (
        closing(Shared(mellum, host_tier_args(), "wait_complete")) as host,
        closing(Shared(mellum, device_args("http://nowhere"), None, of_gpu)) as device,
    ):
        yield {"host": host, "device": device}


@pytest.mark.parametrize("mode", ["host", "device"])
def test_windows_are_stored_and_restored_with_their_prefixes(
    mode: str, servers: dict[str, Shared], store: StoreProcess
) -> None:
    with servers[mode].attached(store.url) as server:
        assert ("of scratch memory on the GPU" in server.log()) == (mode == "device")
        computed = [ask(server, make_prompt(seed)) for seed in range(2)]
        assert not any(map(from_storage, computed))
        wait_until_written(server, 2 * TOKENS // PAGE_SIZE)
        server.flush()
        assert_fetched(server, 0, computed[0])
        _flip_side_pages(store)
        assert_computed(server, 1, computed[1])  # KV without its window is never used
        assert read_metric(server.metrics(), "sgl_kvfetch_corrupt_chunks_total") > 0
        assert same_answer(fetch_again(server, 1), computed[1])  # it is stored again


def test_layers_with_windows_are_restored_as_they_were_and_others_from_coefficients(
    servers: dict[str, Shared], mellum: Path, store: StoreProcess
) -> None:
    profile = calibrated(mellum)
    assert {layer.pool for layer in profile.layers.layers} == {"window", "kv"}
    assert len({layer.rotation for layer in profile.layers.layers}) == 2
    goes_on_in_both_modes(mellum, profile, lambda kind, /, **config: servers[kind].attached(store.url, **config))


def _flip_side_pages(store: StoreProcess) -> None:
    """Flip a bit in the middle of each object of side pages."""
    for path in store.directory.rglob("*.kvm"):
        manifest = decode_manifest(path.read_bytes())
        for side in manifest.sides:
            data = store.directory / manifest.data_name(side)
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
