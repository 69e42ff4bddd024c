from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvfetch.plane import store
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from sgl_kvfetch.types import KVGeometry
from tests.plugin.backends import Make, make_pool, storage_config
from tests.plugin.planes import Served, store_in
from tests.segments import make_heads


@pytest.fixture(autouse=True)
def _all_memory_for_host_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes none unless 10 GiB of the machine's memory stay free, which other tests' servers may need."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served) -> Iterator[Make]:
    """Builds backends on one store. The namespace, which would ask a running engine, is a fixed one."""

    def namespace(config: Any, quantiser: Any, rank: Any, geometry: KVGeometry, first_layer: int, sides: str) -> Any:
        return make_heads(geometry, quantiser, model=f"a model {config.model_id or ''} {rank.tp_rank} {sides}")

    monkeypatch.setattr(starting, "engine_heads", namespace)
    monkeypatch.setattr(starting, "draft_model", lambda config: "a model")
    monkeypatch.setattr(starting, "_launch", served.launch)
    monkeypatch.setattr(starting, "kv_cache_scale", lambda: "")  # it reads the model's files
    made: list[KVFetchStorage] = []

    def build(
        pool: HostKVCache | None = None,
        *,
        sides: Mapping[PoolName, Any] | None = None,
        stages: int = 1,
        place: Mapping[str, Any] | None = None,
        linger_s: float = 0.01,
        **config: Any,
    ) -> KVFetchStorage:
        monkeypatch.setattr(store, "_LINGER_S", linger_s)
        patient = {"lookup_timeout_s": 600, "fetch_timeout_s": 600, "recompute": "never"}  # on slow machines, too
        no_audits = {"audit_share": 0}  # which hits they cut is drawn
        extra = {"store": url, "codec": "zstd"} | patient | no_audits | config
        is_mla = isinstance(pool, MLATokenToKVPoolHost)
        whole = storage_config(extra_config=extra, is_mla_model=is_mla, pp_size=stages, **place or {})
        made.append(KVFetchStorage(whole, pool or make_pool()))
        for name, side in (sides or {}).items():
            made[-1].register_mem_host_pool_v2(side, name)
        made[-1].on_host_pools_registered()
        return made[-1]

    with store_in(tmp_path, monkeypatch) as url:
        yield build
        for backend in made:
            backend.close()
