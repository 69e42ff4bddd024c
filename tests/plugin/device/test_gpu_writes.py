"""Pages that SGLang offloads from a pool on a fake GPU, whose kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.plugin.device.pools import GuardedSource
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from sgl_kvfetch.types import TENSORS
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import LAYERS, loaded, make_quantiser, use_small_model
from tests.plugin.device.rig import page_values, prompt
from tests.segments import there_and_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def quantiser(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> KltQuantiser:
    use_small_model(monkeypatch)
    monkeypatch.setattr(gpu_pages, "_TRIAL_TOKENS", 48)  # the interpreter takes a second for 512
    return make_quantiser()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("is_sound", [True, False], ids=["sound", "faulty"])
def test_the_gpu_quantises_what_is_written(
    is_sound: bool, dtype: torch.dtype, make: MakeRig, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values go to the host only if it fails. Either way, what is stored is what the CPU makes of the pages, but for a
    rounding of a few integers."""
    tokens, gpu = prompt(0), FakeDevice(seed=2)
    if dtype.itemsize == 1:  # else integers take more bytes than the values, which are read then
        quantiser = KltQuantiser(quantiser.profile, step=4.0)
    rig = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, gpu=gpu, dtype=dtype)
    calls = {"quantised": 0, "read": 0}
    read, right = GuardedSource.read_into, KltCells.quantise

    def quantise(*args: Any) -> None:
        calls["quantised"] += 1
        if not is_sound:
            raise RuntimeError("the device is lost")
        right(*args)

    def noted_read(*args: Any) -> Any:
        calls["read"] += 1
        return read(*args)

    monkeypatch.setattr(KltCells, "quantise", quantise)
    monkeypatch.setattr(GuardedSource, "read_into", noted_read)
    rig.stored(tokens)
    assert calls["quantised"]
    assert bool(calls["read"]) == (not is_sound)
    rig.assert_nothing_held()
    expected = there_and_back(quantiser, {t: page_values(tokens, t).to(dtype) for t in TENSORS})
    cpu = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, mode="read_only", dtype=dtype)
    layers = [expected[t][:, layer].float() for t in TENSORS for layer in range(LAYERS)]
    for ours, theirs in zip(loaded(cpu, tokens), layers, strict=True):
        found = ours.view(dtype).float()
        assert float(torch.isclose(found, theirs, rtol=1e-4, atol=1e-4).float().mean()) > 0.95
