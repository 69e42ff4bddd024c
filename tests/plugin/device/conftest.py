from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import unified_radix_cache

from sgl_kvfetch.plane import service, store, store as plane_store
from sgl_kvfetch.plugin import starting, weight_updates
from sgl_kvfetch.plugin.device import linker
from sgl_kvfetch.plugin.versions import WITH_LINKER, installed_version
from sgl_kvfetch.protocol import quantiser
from sgl_kvfetch.protocol.quantiser import config_quantiser
from sgl_kvfetch.stores import with_keys
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.rig import GatedStore, Rig, make_rig
from tests.plugin.planes import store_in

MakeRig = Callable[..., Rig]

collect_ignore_glob = [] if installed_version() in WITH_LINKER else ["test_*.py"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[MakeRig]:
    """Builds ranks on one store, and closes them. After a test that has passed, nothing may be held for requests."""
    num_failed = request.session.testsfailed
    monkeypatch.setattr(plane_store, "with_keys", lambda store, keys: with_keys(GatedStore(store), keys))
    monkeypatch.setattr(store, "_LINGER_S", 0.01)
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 8)
    monkeypatch.setattr(starting, "_launch", starting._launch)  # rigs set these
    monkeypatch.setattr(linker, "open_engine_plane", starting.open_engine_plane)
    monkeypatch.setattr(linker, "_open_pages", linker._open_pages)
    monkeypatch.setattr(service, "config_quantiser", config_quantiser)
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())
    monkeypatch.setattr(unified_radix_cache, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    made: list[Rig] = []

    def build(**changes: Any) -> Rig:
        made.append(make_rig(url, **changes))
        return made[-1]

    with store_in(tmp_path, monkeypatch) as url:
        yield build
        for rig in made:
            rig.store.lookups.is_open = rig.store.reads.is_open = True
            if request.session.testsfailed == num_failed:
                rig.assert_nothing_held()
            rig.cache.release_host_resources()


@pytest.fixture(params=["python", "rust"])
def rig(make: MakeRig, request: pytest.FixtureRequest) -> Rig:
    return make(core=request.param)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels' PyTorch references, because the interpreter takes far longer."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
