"""Tests through how many modules a page passes, and on which threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from harness.store_process import StoreProcess
from sgl_kvfetch.protocol import quantiser
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import LAYERS, make_quantiser, use_small_model
from tests.plugin.device.rig import prompt
from tests.plugin.paths import SOMETIMES, modules_run, require_drawn
from tests.test_threads import assert_threads

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]

THREADS = "copy", "data", "decode", "encode", "load", "segment"


@pytest.mark.parametrize("kind", ["exact", "klt"])
def test_the_path_of_a_page_to_a_gpu(kind: str, make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading how pages come means reading these modules. References stand for kernels."""
    use_small_model(monkeypatch)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    model: dict[str, Any] = {"codec": "ans", "num_layers": LAYERS, "max_tp_size": 1}
    if kind == "klt":
        model["quantiser"] = make_quantiser()
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        writer = make(store=store.url, **model)
        for number in range(2):
            writer.stored(prompt(number))
        rig = make(store=store.url, gpu=FakeDevice(), mode="read_only", **model)
        monkeypatch.setattr(rig, "compute", lambda *args: None)  # SGLang's part
        monkeypatch.setattr(rig.linker, "batch_ended", lambda *args: None)
        for number in range(2):  # the first load makes what all have
            rig.hear_plane()
            rig.served.wait_until_idle()
            seen.clear()
            assert rig.admit(rig.arrive_staged(prompt(number))) == [32]
        modules = set(seen)
        rig.cache.release_host_resources()
    require_drawn(f"to a GPU, `{kind}`", modules)


def test_the_path_of_a_page_to_the_store(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 32)
    before = threading.enumerate()
    with StoreProcess(tmp_path / "store") as store, modules_run() as seen:
        rig = make(store=store.url, num_layers=1, max_tp_size=1)
        for number in range(2):
            rig.served.wait_until_idle()
            seen.clear()
            rig.compute(prompt(number))
            rig.write_all()
        modules = set(seen)
        rig.flush()
        assert rig.admit(rig.arrive_staged(prompt(1))) == [32]
        # The data plane has its threads here: all of a write's and a fetch's have run.
        assert_threads(before, {"kvfetch", *(f"kvfetch-{name}" for name in THREADS)})
        rig.cache.release_host_resources()
    require_drawn("to the store", modules, SOMETIMES[:1])
