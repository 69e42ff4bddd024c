from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.codec.container.reader import CellFrames
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane import client, store as plane_store
from sgl_kvfetch.plane.store import _open_store as open_configured
from sgl_kvfetch.plugin import data_plane as plane
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.cuda_pages import GEOMETRY, NUM_PAGES, Segment, cells_of
from tests.plugin.device.gated_store import GatedStore
from tests.plugin.device.rig import Rig, make_rig
from tests.segments import make_segment

MakeRig = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Builds ranks on one store, and closes them."""
    monkeypatch.setattr(plane_store, "_open_store", lambda *args: GatedStore(open_configured(*args)))
    monkeypatch.setattr(client, "_LINGER_S", 0.01)
    monkeypatch.setattr(client, "SPAN_TOKENS", 8)
    monkeypatch.setattr(plane, "_launch", plane._launch)  # rigs set it
    made: list[Rig] = []

    def build(**changes: Any) -> Rig:
        made.append(make_rig(tmp_path, **changes))
        return made[-1]

    yield build
    for rig in made:
        rig.store.lookups.is_open = rig.store.reads.is_open = True
        rig.cache.release_host_resources()


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make()


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels' PyTorch references, because the interpreter takes far longer."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture(scope="module")
def exact() -> Segment:
    return make_segment(GEOMETRY, NUM_PAGES, span_pages=4)


@pytest.fixture(scope="module")
def decoded(exact: Segment) -> list[CellFrames]:
    return [reader.decode_frames(cell, data) for reader, cell, data in cells_of(exact, make_quantiser("exact"))]
