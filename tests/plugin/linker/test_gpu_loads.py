"""Loads into a pool on a fake GPU, whose kernels run in Triton's interpreter: they restore what the CPU does."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from harness.metrics import own_metric
from harness.waiting import wait_until
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plane import client
from sgl_kvfetch.plugin.linker import coded_loads, gpu_loads
from sgl_kvfetch.plugin.linker.gpu_loads import GpuLoader
from sgl_kvfetch.triton_kernels.ans import ans_decode_table
from tests.codec.quant.profiles import make_profile
from tests.plugin.device import rig as device_rig
from tests.plugin.device.fake_streams import ClockedDevice, ClockedStream, FakeDevice
from tests.plugin.device.rig import prompt
from tests.plugin.linker import rig as linker_rig
from tests.plugin.linker.conftest import MakeRig
from tests.plugin.linker.rig import Rig, key_of

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, HEADS, DIM = 3, 2, 8
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and the CPU's fastest products round more than one in float32."""
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)
    monkeypatch.setattr(client, "SPAN_TOKENS", 32)
    for module in (device_rig, linker_rig):
        for name, value in (("LAYERS", LAYERS), ("HEADS", HEADS), ("DIM", DIM)):
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def quantiser() -> KltQuantiser:
    rope = Rope(inv_freq=tuple(100.0 ** (-i / 4) for i in range(4)))
    profile = make_profile(num_layers=LAYERS, num_heads=HEADS, head_dim=DIM, cell_layers=2, cell_heads=1, rope=rope)
    return KltQuantiser(profile, step=0.25)


def loaded(rig: Rig, tokens: list[int]) -> list[torch.Tensor]:
    """What the tree has of a prompt after it was admitted, layer by layer, K then V."""
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    assert rig.admit(request) == [len(tokens)]
    matched = rig.cache.match_prefix(linker_rig.MatchPrefixParams(key=key_of(tokens)))
    assert matched.device_prefix_len == len(tokens)
    slots = rig.cache.path_device_indices(matched.last_device_node)
    return [buffer[slots] for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer)]


@pytest.mark.parametrize("scratch_bytes", [LARGE, 3 << 10])
def test_coded_cells_are_restored_on_the_gpu(
    make: MakeRig, quantiser: KltQuantiser, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "SCRATCH_BYTES", scratch_bytes)
    tokens = prompt(0)
    cpu = make(quantiser=quantiser, codec="ans", num_layers=LAYERS)
    cpu.stored(tokens)
    expected = loaded(cpu, tokens)
    gpu = FakeDevice()
    rig = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, gpu=gpu, mode="read_only")
    loader = rig.linker._loader
    assert isinstance(loader, GpuLoader)
    decoded: list[int] = []

    def decode(data: torch.Tensor, table: torch.Tensor, *args: Any) -> None:
        decoded.append(len(table))
        ans_decode_table(data, table, *args)

    monkeypatch.setattr(coded_loads, "ans_decode_table", decode)
    found = loaded(rig, tokens)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # sums in another order
    assert sum(decoded) == 4  # two layer groups, two heads
    assert len(decoded) == 2 if scratch_bytes == LARGE else len(decoded) > 2
    assert len(gpu.pinned_memory) == 1
    rig.assert_nothing_held()


def test_a_prompt_of_which_the_tree_has_a_part_is_restored_from_there_on(
    make: MakeRig, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(0)
    make(quantiser=quantiser, codec="ans", num_layers=LAYERS).stored(tokens)
    rig = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, gpu=FakeDevice(), mode="read_only")
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    rig.compute(tokens[:12])
    assert rig.admit(request) == [20]
    assert rig.holds(tokens[:12], 12)
    rig.assert_nothing_held()


def test_cells_that_the_gpu_decodes_wrongly_abort_their_request_and_are_decoded_by_the_cpu_from_then_on(
    make: MakeRig, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(0)
    cpu = make(quantiser=quantiser, codec="ans", num_layers=LAYERS)
    cpu.stored(tokens)
    expected = loaded(cpu, tokens)
    rig = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, gpu=FakeDevice(), mode="read_only")

    def decode(data: torch.Tensor, table: torch.Tensor, num_energies: int, out: torch.Tensor, *args: Any) -> None:
        ans_decode_table(data, table, num_energies, out, *args)
        out[0] ^= 1

    monkeypatch.setattr(coded_loads, "ans_decode_table", decode)
    before = own_metric("sgl_kvfetch_misses_total", stage="load", reason="corrupt")
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    rig.admit(request)
    assert request.discard_output_reason is not None
    assert own_metric("sgl_kvfetch_misses_total", stage="load", reason="corrupt") == before + 1
    rig.hear_plane()
    for ours, theirs in zip(loaded(rig, tokens), expected, strict=True):
        assert torch.equal(ours, theirs)
    rig.assert_nothing_held()


def test_a_load_that_cannot_be_launched_aborts_its_request_and_frees_its_memory(
    make: MakeRig, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "SCRATCH_BYTES", 512)  # too little for a cell
    tokens = prompt(0)
    make(quantiser=quantiser, codec="ans", num_layers=LAYERS).stored(tokens)
    rig = make(quantiser=quantiser, codec="ans", num_layers=LAYERS, gpu=FakeDevice(), mode="read_only")
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    rig.admit(request)
    assert request.discard_output_reason is not None
    rig.assert_nothing_held()


def test_values_of_other_quantisers_are_copied_layer_by_layer(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_loads, "SCRATCH_BYTES", 1 << 10)
    tokens = prompt(0)
    make(num_layers=LAYERS).stored(tokens)
    rig = make(num_layers=LAYERS, gpu=FakeDevice(seed=1), mode="read_only")
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    assert rig.admit(request) == [32]
    assert rig.holds(tokens, 32)
    rig.assert_nothing_held()


def test_a_layer_computes_while_later_ones_are_loaded(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes a millisecond to load, and as long to compute."""
    make(num_layers=LAYERS).stored(prompt(0))
    gpu = ClockedDevice()
    rig = make(num_layers=LAYERS, gpu=gpu, mode="read_only")
    request = rig.arrive(prompt(0))
    rig.await_unparked(request)
    request.init_next_round_input(rig.cache)
    rig.load_back(request)
    gpu.cost_ms = 0.5  # K and V
    index = rig.cache.ready_to_load_host_cache()
    rig.linker.layer_done_counter.set_consumer(index)
    wait_until(lambda: all(future.done() for future in rig.linker.layer_done_counter.futures[index]))
    gpu.cost_ms = 1.0
    with_loads = cast(ClockedStream, gpu.forward)
    monkeypatch.setattr(gpu, "current_stream", lambda: gpu.forward)
    for layer in range(LAYERS):
        rig.linker.layer_done_counter.wait_until(layer)
        gpu.launch(gpu.forward, lambda: None)
    gpu.run()
    assert with_loads.now_ms == pytest.approx(LAYERS + 1)
    assert not rig.cache.finish_external_linker_loads([request])
