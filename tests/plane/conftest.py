from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.imported_sglang import data_planes_are_forked
from harness.serving import serving


@pytest.fixture(scope="package", autouse=True)
def _forked_data_planes() -> Iterator[None]:
    with data_planes_are_forked():
        yield


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path / "store") as url:
        yield url
