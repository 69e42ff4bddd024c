from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.plane import client
from sgl_kvfetch.plane.open import open_hedged
from sgl_kvfetch.plugin import data_plane as plane
from tests.plugin.device.gated_store import GatedStore
from tests.plugin.device.rig import Rig, make_rig

MakeRig = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Builds ranks on one store, and closes them."""
    monkeypatch.setattr(client, "open_hedged", lambda *args, **kwargs: GatedStore(open_hedged(*args, **kwargs)))
    monkeypatch.setattr(client, "_LINGER_S", 0.01)
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
