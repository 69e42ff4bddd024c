from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import stalls
from harness.faults import Fault


async def test_a_hang_costs_the_deadline_without_second_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "NUM_READS", 4)
    monkeypatch.setattr(stalls, "DEADLINE_S", 5.0)
    scene = stalls.Scene("a connection hangs", Fault("hang", times=1))
    without = await stalls.run_fetch(scene, 0, tmp_path)
    assert (without.reads_done, without.hedges) == (3, {"refused": 1})
    hedged = await stalls.run_fetch(scene, 4, tmp_path)
    assert (hedged.reads_done, hedged.hedges) == (4, {"won": 1})
    assert hedged.duration_s < without.duration_s
