"""Tests how often a request's work passes from one thread or process to another, and through how many modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.handovers import hand_overs, require_equal
from harness.store_process import StoreProcess
from sgl_kvfetch.plane import client
from tests.plugin.device.rig import prompt
from tests.plugin.device.test_handovers import modules_run
from tests.plugin.linker.conftest import MakeRig

pytestmark = pytest.mark.filterwarnings("ignore")

SIX = [
    "SGLang -> event loop: Stage",
    "event loop -> kvfetch-decode: DecodePool._run",
    "kvfetch-decode -> event loop: Fetcher._restore.end",
    "event loop -> SGLang: Staged",
    "SGLang -> kvfetch-load: ValueLoader._run",
    "kvfetch-load -> event loop: Unstage",
]
MOST_MODULES = 54


def test_hand_overs_of_a_prompt_of_one_cell(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SPAN_TOKENS", 32)
    with StoreProcess(tmp_path / "store") as store, hand_overs() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = prompt(0)
        rig.stored(tokens)
        rig.hear_plane()
        seen.clear()
        request = rig.arrive(tokens)
        rig.await_unparked(request)
        assert rig.admit(request) == [32]
        require_equal(seen, SIX)
        rig.cache.release_host_resources()


def test_a_fetch_runs_through_few_modules(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading how a fetch works means reading these modules."""
    monkeypatch.setattr(client, "SPAN_TOKENS", 32)
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = prompt(0)
        rig.stored(tokens)
        rig.hear_plane()
        seen.clear()
        monkeypatch.setattr(rig, "_compute", lambda *args: None)  # SGLang's part, after which pages are written
        monkeypatch.setattr(rig.linker, "batch_ended", lambda *args: None)
        request = rig.arrive(tokens)
        rig.await_unparked(request)
        assert rig.admit(request) == [32]
        modules = sorted(seen)
        rig.cache.release_host_resources()
    assert len(modules) <= MOST_MODULES, "\n".join(modules)
