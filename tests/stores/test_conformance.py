from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sgl_kvfetch.stores import AdminStore
from tests.stores.conformance import AdminStoreConformance
from tests.stores.conftest import opened

KINDS: dict[str, dict[str, int]] = {"directory": {}, "bounded": {"capacity_bytes": 100 << 20}, "front": {}}
WITH_PROCESSES = "served", "served front", "bucket", "bucket with index", "ceph", "ceph with index"


class TestStores(AdminStoreConformance):
    @pytest.fixture(params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.process) for kind in WITH_PROCESSES)])
    async def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminStore]:
        kind = request.param
        self.checks_manifests = not kind.startswith(("bucket", "ceph"))
        self.finds_parts = kind not in ("bucket", "ceph")
        options = KINDS.get(kind, {})
        async with opened("directory" if kind == "bounded" else kind, tmp_path, request, **options) as store:
            yield store
