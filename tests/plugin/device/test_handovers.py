"""Tests how often a request's work passes from one thread or process to another, and through how many modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import sgl_kvfetch
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


MOST_MODULES = 53


@contextmanager
def modules_run() -> Iterator[set[str]]:
    """Collect the package's modules in which a function runs, on this thread and those that start meanwhile."""
    package = str(Path(sgl_kvfetch.__file__).parent)
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(package):
            seen.add(path.removeprefix(package))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_fetch_runs_through_few_modules(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading how a fetch works means reading these modules."""
    monkeypatch.setattr(client, "SPAN_TOKENS", 32)
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = prompt(0)
        rig.stored(tokens)
        rig.hear_plane()
        seen.clear()
        assert rig.fetch(tokens) == (32, 32)
        rig.settle()
        modules = sorted(seen)
        rig.cache.release_host_resources()
    assert len(modules) <= MOST_MODULES, modules
