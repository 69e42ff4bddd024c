"""``kvfetch doctor`` on a GPU. This module does without SGLang, as `scripts/gpu_check` may have to."""

from __future__ import annotations

import pytest

from sgl_kvfetch.tools import doctor


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    found = {check.name: check for check in doctor.check_gpu()}
    assert found["CUDA GPU"].status == "yes"
    assert "HEVC 4:4:4 8-bit" in found["NVDEC"].found
