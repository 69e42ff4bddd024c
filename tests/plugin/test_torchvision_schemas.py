from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_kvfetch.plugin import torchvision_schemas


def test_torchvision_can_be_imported_next_to_a_cpu_build_of_torch(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torchvision's own extension loads here")
    code = (
        "from sgl_kvfetch.plugin.torchvision_schemas import install; install()\n"
        "import torchvision.transforms, torch\n"
        "assert hasattr(torch.ops.torchvision, 'nms')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_installing_twice_is_installing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    torchvision_schemas.install()
    finders = list(sys.meta_path)
    torchvision_schemas.install()
    assert sys.meta_path == finders
