from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.waiting import WAIT_S

MODULE = Path(__file__).parent.parent / "scripts" / "torchvision_schemas.py"


@pytest.mark.process
def test_torchvision_can_be_imported_next_to_a_cpu_build_of_torch(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torchvision's own extension loads here")
    code = (
        f"import sys; sys.path.insert(0, {str(MODULE.parent)!r})\n"
        "from torchvision_schemas import install; install()\n"
        "import torchvision.transforms, torch\n"
        "assert hasattr(torch.ops.torchvision, 'nms')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=WAIT_S)
