from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import main


@pytest.mark.slow
def test_half_a_minute_of_everything_leaves_a_sound_store(tmp_path: Path) -> None:
    sizes = ["--minutes", "0.4", "--clients", "8", "--slow-readers", "8", "--capacity", "32", "--orphan-age", "5"]
    code = main([*sizes, "--longest-lookup", "20", "--json", str(tmp_path / "soak.json")])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["problems"] == []
    assert code == 0
    assert found["disturbances"]["killed"] > 0
    assert found["disturbances"]["full"] > 0
    for operation, result in (("read", "hit"), ("write", "done"), ("replace", "done"), ("delete", "done")):
        assert found["outcomes"][operation][result] > 0
