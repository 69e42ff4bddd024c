"""The kernels run on a GPU, or, without one, in Triton's interpreter."""

from __future__ import annotations

import pytest

from sgl_kvfetch.triton_kernels.runtime import use_kernels
from tests.triton_kernels.cases import DEVICE


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    """Otherwise the tests would compare the reference with itself."""
    assert use_kernels(DEVICE), "Triton does not interpret: it was imported before TRITON_INTERPRET=1 was set"
