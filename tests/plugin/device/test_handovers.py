"""Tests how often a request's work passes from one thread or process to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.handovers import hand_overs, require_equal
from harness.store_process import StoreProcess
from sgl_kvfetch.plane import client
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import prompt

pytestmark = pytest.mark.filterwarnings("ignore")

TEN = [
    "SGLang -> event loop: LookUp",
    "event loop -> SGLang: Found",
    "SGLang -> event loop: FetchPages",
    "event loop -> SGLang: LinkHasRoom",
    "event loop -> kvfetch-decode: DecodePool._run",
    "kvfetch-decode -> kvfetch-data: Piece",
    "kvfetch-data -> event loop: FreePiece",
    "kvfetch-decode -> event loop: Fetcher._restore.end",
    "event loop -> kvfetch-data: RoundOver",
    "kvfetch-data -> SGLang: PageCount, by the board",
]
SLOTS = [
    "event loop -> SGLang: RoundHere",
    "SGLang -> event loop: Give",
    "kvfetch-data -> SGLang: Done, by the board",
]


@pytest.mark.parametrize("has_slots", [True, False])
def test_hand_overs_of_a_lookup_and_a_round_of_one_cell(
    make: MakeRig, tmp_path: Path, has_slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SPAN_TOKENS", 32)
    with StoreProcess(tmp_path / "store") as store, hand_overs() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = prompt(0)
        rig.stored(tokens)
        if not has_slots:
            for seed in range(1, 9):
                rig.compute(prompt(seed))
            rig.write_all()
        rig.hear_plane()
        seen.clear()
        assert rig.fetch(tokens) == (32, 32)
        rig.settle()
        require_equal(seen, TEN if has_slots else TEN + SLOTS)
        rig.cache.release_host_resources()
