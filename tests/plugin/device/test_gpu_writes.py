"""Pages that SGLang offloads from a pool on a fake GPU, whose kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.metrics import own_metric
from harness.waiting import wait_until
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.plugin.device.pools import GuardedSource
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from sgl_kvfetch.types import TENSORS
from tests.plugin.device import rig as rig_module
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
    read, right = GuardedSource.read, KltCells.quantise

    def quantise(*args: Any) -> None:
        calls["quantised"] += 1
        if not is_sound:
            raise RuntimeError("the device is lost")
        right(*args)

    def noted_read(*args: Any) -> Any:
        calls["read"] += 1
        return read(*args)

    monkeypatch.setattr(KltCells, "quantise", quantise)
    monkeypatch.setattr(GuardedSource, "read", noted_read)
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


@pytest.mark.parametrize("by_gpu", [True, False], ids=["quantised on the GPU", "read from the GPU"])
@pytest.mark.parametrize("fault", [None, "layers", "weights"])
def test_an_audit_compares_what_a_gpu_has_computed(
    fault: str | None, by_gpu: bool, make: MakeRig, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes the end of a hit, and offloads it as it does all pages."""
    quantised: list[KltCells] = []
    right = KltCells.quantise

    def noted(cells: KltCells, *args: Any) -> None:
        quantised.append(cells)
        right(cells, *args)

    monkeypatch.setattr(KltCells, "quantise", noted)
    of_klt = {"quantiser": quantiser, "codec": "ans"} if by_gpu else {}
    rig = make(num_layers=LAYERS, gpu=FakeDevice(seed=2), audit_share=1, **of_klt)
    tokens = rig.stored(prompt(0))
    results = {"sound": 0.0, "beyond": 0.0, "failed": 0.0}

    def since() -> dict[str, float]:
        now = {name: own_metric("sgl_kvfetch_audits_total", result=name) for name in results}
        return {name: count - results[name] for name, count in now.items() if count > results[name]}

    results |= since()
    quantised.clear()

    def other(tokens: Any, tensor: str) -> torch.Tensor:
        values = page_values(tokens, tensor)
        if fault == "weights":
            values = values + 0.5 * page_values([token + 1 for token in tokens], tensor)
        return values.roll(1, dims=1) if fault == "layers" else values

    monkeypatch.setattr(rig_module, "page_values", other)
    assert rig.fetch(tokens) == 0  # a hit as short as an audit is computed
    rig.write_all()
    wait_until(lambda: bool(since()))
    assert bool(quantised) == by_gpu
    (result,) = since()
    assert (result == "sound") == (fault is None), result
    assert result != "failed"
