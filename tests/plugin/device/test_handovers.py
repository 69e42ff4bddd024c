"""Tests how often a request's work passes from one thread or process to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.handovers import hand_overs
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_hand_overs_of_a_lookup_and_a_round_of_one_cell(make: MakeRig, tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store") as store, hand_overs() as seen:
        rig = make(store=store.url, span_tokens=32, num_layers=1, max_tp_size=1)
        tokens = prompt(0)
        rig.stored(tokens)
        rig.hear_plane()
        seen.clear()
        assert rig.fetch(tokens) == (32, 32)
        rig.settle()
        wait_until(lambda: len(seen) >= 21, found=lambda: "\n".join(map(str, seen)))
        assert len(seen) == 21, "\n".join(map(str, seen))
        rig.cache.release_host_resources()
