"""The kernels run on a GPU, or, without one, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.beside import install_beside
from sgl_kvfetch.triton_kernels.runtime import use_kernels
from tests.triton_kernels.cases import DEVICE
from tests.triton_kernels.tritons import oldest_version


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    """Otherwise the tests would compare the reference with itself."""
    assert use_kernels(DEVICE), "Triton does not interpret: it was imported before TRITON_INTERPRET=1 was set"


@pytest.fixture(scope="session")
def oldest_triton() -> Path:
    """The folder of the oldest Triton, installed at its first use (170 MB over the network)."""
    try:
        return install_beside("triton", oldest_version())
    except RuntimeError as error:
        pytest.skip(f"the oldest Triton cannot be installed: {error}")
