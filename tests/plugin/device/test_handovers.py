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
from sgl_kvfetch.protocol import quantiser
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import prompt
from tests.test_threads import assert_threads

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]

EIGHT = [
    "SGLang -> event loop: Stage",
    "event loop -> kvfetch-receive: _Connection.run",
    "kvfetch-receive -> event loop: _chain_future._set_state",
    "event loop -> kvfetch-decode: DecodePool._run",
    "kvfetch-decode -> event loop: Fetcher._decode.end",
    "event loop -> SGLang: Staged",
    "SGLang -> kvfetch-load: ValueLoader._run",
    "kvfetch-load -> event loop: Unstage",
]
THREADS = "copy", "data", "decode", "encode", "load", "segment"
MOST_MODULES = 37


def test_hand_overs_of_a_prompt_of_one_cell(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 32)
    before = threading.enumerate()
    with StoreProcess(tmp_path / "store") as store, hand_overs() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = rig.stored(prompt(0))
        rig.hear_plane()
        seen.clear()
        request = rig.arrive_staged(tokens)
        assert rig.admit(request) == [32]
        require_equal(seen, EIGHT)
        # The data plane has its threads here: all of a write's and a fetch's have run.
        assert_threads(before, {"kvfetch", *(f"kvfetch-{name}" for name in THREADS)})
        rig.cache.release_host_resources()


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
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 32)
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        tokens = rig.stored(prompt(0))
        rig.hear_plane()
        rig.served.wait_until_idle()
        seen.clear()
        monkeypatch.setattr(rig, "_compute", lambda *args: None)  # SGLang's part, after which pages are written
        monkeypatch.setattr(rig.linker, "batch_ended", lambda *args: None)
        request = rig.arrive_staged(tokens)
        assert rig.admit(request) == [32]
        # What was computed is written meanwhile. On a busy machine, a read may be silent for long, and the store's
        # opener counts that.
        modules = sorted(module for module in seen if not module.startswith(("/plane/write/", "/plane/store.py")))
        rig.cache.release_host_resources()
    assert len(modules) <= MOST_MODULES, "\n".join(modules)
