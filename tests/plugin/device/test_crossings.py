"""Each pair of features in device mode, on a stand-in GPU (tests/crossings.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.metrics import own_metric
from harness.waiting import wait_until
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.types import TENSORS
from tests.crossings import Pair, assert_memory_is_read, is_cut, let_happen, to_run
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import LAYERS, make_quantiser, use_small_model
from tests.plugin.device.rig import PAGE, Ranks, Rig, prompt
from tests.segments import there_and_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

AUDITED_PAGES = 128 // PAGE
SERVED_PAGES = 8  # of a hit that is audited
SERVED = prompt(0, SERVED_PAGES)
WINDOW = 2 * PAGE


@pytest.fixture(autouse=True)
def _small(make: MakeRig, monkeypatch: pytest.MonkeyPatch, reference: None) -> None:
    use_small_model(monkeypatch)
    monkeypatch.setattr(gpu_pages, "_TRIAL_TOKENS", 48)  # the interpreter takes a second for 512


def config_of(pair: Pair, folder: Path) -> dict[str, Any]:
    """Return what a rank is made with."""
    (folder / "key").write_text("0f" * 32)
    of_features: dict[str, dict[str, Any]] = {
        "audits": {"audit_share": 1},
        "levels": {"quantiser": make_quantiser(), "levels": {"count": 3}},
        "encryption": {"key_file": str(folder / "key")},
        "side pages": {"window": WINDOW},
        "draft model": {"following": "draft"},
        "`memory_cache`": {"memory_cache": "1MiB"},
    }
    # Shared memory is as large as the pool: there must be room for the tables of coded cells, which are small here.
    config: dict[str, Any] = {"codec": "ans", "num_layers": LAYERS, "num_slots": 1024}
    for feature in pair:
        config |= of_features.get(feature, {})
    return config


@pytest.mark.parametrize("pair", to_run("device"), ids=str)
def test_two_features(pair: Pair, make: MakeRig, tmp_path: Path) -> None:
    num_ranks = 1 + ("TP 2" in pair)
    ranks = Ranks(num_ranks)
    config = config_of(pair, tmp_path)
    rigs = [
        make(**config, rank=rank, gpu=FakeDevice(seed=rank), agree=ranks.agree(rank) if num_ranks > 1 else None)
        for rank in range(num_ranks)
    ]
    audits = {result: own_metric("sgl_kvfetch_audits_total", result=result) for result in ("sound", "beyond", "failed")}

    def since(result: str) -> float:
        return own_metric("sgl_kvfetch_audits_total", result=result) - audits[result]

    ranks.run(lambda rank, history: _Rank(rigs[rank], rank, pair, ranks).play())
    if is_cut(pair):
        wait_until(lambda: since("sound") >= num_ranks)
    assert since("beyond") == since("failed") == 0


class _Rank:
    def __init__(self, rig: Rig, number: int, pair: Pair, ranks: Ranks) -> None:
        self.rig, self.number, self.pair, self._agree = rig, number, pair, ranks.agree(number)
        self._quantiser: KltQuantiser | None = make_quantiser() if "levels" in pair else None
        self.tokens = SERVED + prompt(1, AUDITED_PAGES if "audits" in pair else 4)

    def play(self) -> None:
        rig = self.rig
        if "LoRA" in self.pair:
            rig.extra_key = "another adapter"
            self.store()
            rig.extra_key = "adapter"
            assert self.fetch() == 0
        self.store()
        let_happen(self.pair, self)
        with assert_memory_is_read(self.pair):
            for _ in range(2):
                assert self.fetch() == len(SERVED if is_cut(self.pair) else self.tokens)
        assert rig.cache.protected_size() == 0
        rig.assert_no_memory_held()

    def store(self) -> None:
        """In two parts, so that there are side pages for the end of each."""
        self.rig.flush()
        self.rig.stored(SERVED)
        self.rig.stored(self.tokens)

    def fetch(self) -> int:
        """Return how many tokens were loaded."""
        rig = self.rig
        if "`memory_cache`" in self.pair:  # which a flush empties
            rig.evict()
            rig.overwrite()
        else:
            rig.flush()
        request = rig.arrive_staged(self.tokens)
        (num_loaded,) = rig.admit(request)
        assert request.discard_output_reason is None
        self._check(num_loaded)
        rig.write_all()
        return num_loaded

    def _check(self, num_loaded: int) -> None:
        rig = self.rig
        gpu: Any = rig.linker._pages.device
        gpu.run()
        slots = rig.checked_slots(self.tokens, WINDOW)
        if self._quantiser is None:
            assert rig.holds(self.tokens, len(self.tokens))
        else:
            computed = {tensor: rig.values(self.tokens, tensor) for tensor in TENSORS}
            restored = there_and_back(self._quantiser, computed)
            for tensor, buffers in zip(TENSORS, (rig.pool.k_buffer, rig.pool.v_buffer), strict=True):
                found = torch.stack([buffer[slots] for buffer in buffers], dim=1)
                assert torch.equal(found[num_loaded:], computed[tensor][num_loaded:])
                # The GPU rounds a few coefficients to their other neighbour.
                is_close = torch.isclose(found[:num_loaded], restored[tensor][:num_loaded], rtol=1e-4, atol=1e-4)
                assert not num_loaded or float(is_close.float().mean()) > 0.95

    def abort(self) -> None:
        """While its pages are read, or wait in this machine's memory."""
        rig = self.rig
        rig.store.reads.is_open = False
        request = rig.arrive(self.tokens)
        if "`memory_cache`" not in self.pair:
            wait_until(lambda: rig.store.reads.num_waiting > 0)
        rig.step()
        rig.linker.prefixes.leave(request.rid)
        rig.store.reads.is_open = True

    def restart(self) -> None:
        plane = self.rig.parts.plane
        former = plane.memory
        plane._peer.running.kill()
        wait_until(lambda: plane.memory is not former)

    def update(self) -> None:
        """As an operator does it: nothing is read or written until the store is attached under another name."""
        rig = self.rig
        if self.number == 0:
            weight_updates.weights_change("a crossing")
        self._wait_for_others()
        assert self.fetch() == 0
        rig.weights = "new weights"
        rig.flush()
        self._wait_for_others()
        weight_updates.tree_is_empty()
        rig.linker.detach()
        rig.connect(model_id="new weights")
        assert self.fetch() == 0
        self.store()

    def _wait_for_others(self) -> None:
        self._agree(torch.zeros(1))
