from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.imported_sglang import data_planes_are_forked


@pytest.fixture(scope="package", autouse=True)
def _forked_data_planes() -> Iterator[None]:
    with data_planes_are_forked():
        yield
