"""``deploy/kvfetch.service``, as systemd's own checks judge it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parent.parent / "deploy" / "kvfetch.service"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"),
]


def analyze(*args: str) -> None:
    done = subprocess.run(["systemd-analyze", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    command = shutil.which("kvfetch")
    assert command is not None
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvfetch/bin/kvfetch", command))
    analyze("verify", "--man=no", str(unit))


def test_the_unit_exposes_little() -> None:
    analyze("security", "--offline=yes", "--threshold=20", str(UNIT))  # tenths; 96 without any hardening
