"""Pages of K and V on a fake GPU: which pools are taken, what is read, quantised and prepared, and in which order.
Work is done late and in random order, as far as streams and events allow. Triton's interpreter quantises."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from torch.utils._python_dispatch import TorchDispatchMode

from harness.metrics import own_metric
from harness.waiting import WAIT_S, polls
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.engine import data_plane as plane_module
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import store
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.device import gpu_pages, linker, pools as pools_module
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.pools import EnginePools, GuardedSource, PageRun
from sgl_kvfetch.protocol import quantiser as quantiser_module
from sgl_kvfetch.protocol.arena import pages_in
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.protocol.quantiser import written_places
from sgl_kvfetch.triton_kernels import quantise_klt
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.codec.quant.profiles import make_profile, place_of
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import (
    GEOMETRY,
    LAYERS,
    NUM_SLOTS,
    PLACES,
    loaded,
    make_pages,
    make_pool,
    make_quantiser,
    set_slots,
    slots_of,
    use_small_model,
)
from tests.plugin.device.rig import PAGE, page_values, prompt
from tests.segments import make_heads, there_and_back

pytestmark = pytest.mark.filterwarnings("ignore")

WIDE = KVGeometry(num_layers=4, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=16, dtype="bfloat16")
MEMORY = torch.empty(1 << 20, dtype=torch.uint8)  # shared, as far as reads know
MARGIN = 64  # bytes around what is read


def make_klt() -> KltQuantiser:
    """Return the quantiser of a model with the cache ``WIDE``."""
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)))
    return KltQuantiser(make_profile(num_layers=4, num_heads=4, head_dim=64, cell_heads=1, rope=rope), step=0.5)


def read_pages(run: PageRun, num_pages: int, geometry: KVGeometry = GEOMETRY) -> list[torch.Tensor]:
    """Return K and V of a run's first pages, as a data plane finds them in shared memory. Nothing else is written."""
    shared = torch.full((MARGIN + num_pages * geometry.page_bytes + MARGIN,), 0xEE, dtype=torch.uint8)
    run.read_into(range(num_pages), shared, MARGIN)
    assert bool((shared[:MARGIN] == 0xEE).all())
    assert bool((shared[-MARGIN:] == 0xEE).all())
    return pages_in(shared[MARGIN:-MARGIN], geometry, num_pages)


@pytest.mark.usefixtures("reference")
def test_a_gpu_is_used_and_another_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pool = FakeDevice(), make_pool()
    monkeypatch.setattr(pools_module, "Device", lambda _: device)
    pools = EnginePools(pool, range(4))
    assert not linker._open_pages(pools, 4, device.forward)[1]
    pool.device = "cuda"
    pages, takes_code = linker._open_pages(pools, 4, device.forward)
    assert (type(pages), takes_code) == (CudaPages, True)
    monkeypatch.setenv("KVFETCH_GPU", "0")
    assert not linker._open_pages(pools, 4, device.forward)[1]
    pool.device = "xpu"
    with pytest.raises(UnsupportedError, match="device mode does not support xpu: add --enable-hierarchical-cache"):
        linker._open_pages(pools, 4, device.forward)


def test_latent_vectors_are_read() -> None:
    """Both parts of MLA's vectors, which are one tensor in SGLang's pool."""
    geometry = KVGeometry(num_layers=4, num_heads=1, k_head_dim=16, v_head_dim=48, page_size=4, dtype="bfloat16")
    pool = MLATokenToKVPool(NUM_SLOTS, 4, torch.bfloat16, 48, 16, 4, "cpu", False)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    device = FakeDevice()
    pages = CudaPages(pool, 4, device, device.forward)
    assert pages.geometry == geometry
    read = [x.flatten(0, 1) for x in read_pages(pages.open_reads(slots_of(PLACES)), len(PLACES), geometry)]
    latent = torch.stack([x[slots_of(PLACES)] for x in pool.kv_buffer], dim=1)  # (tokens, layers, heads, dim)
    assert torch.equal(torch.cat([read[1], read[0]], dim=-1), latent)


def test_rotations_are_right_also_of_spans_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser_module, "SPAN_TOKENS", 64)
    device, quantiser = FakeDevice(), make_klt()
    device.num_free_bytes = 16 * (60 << 10)
    pages = make_pages(device, WIDE)
    places = written_places(parse_config({"store": "http://kv"}), make_heads(WIDE, quantiser), quantiser, 64)
    pages.prepare(quantiser, places)
    assert len(pages._rotations) == 3
    assert quantiser.profile is not None
    rotations = quantiser.profile.rotations
    assert rotations is not None
    for first_token in range(0, 512, 64):
        table = pages.rotations_of(rotations, range(first_token, first_token + 64))
        assert torch.equal(table, rotations.make_table(first_token, 64))


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("failing", ["_compile", "rotations_of"])
def test_if_kernels_or_memory_fail_at_the_start_the_gpu_gets_values(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data plane is told before it starts. Another attempt may succeed."""
    quantiser, pages, config = make_klt(), make_pages(FakeDevice(), WIDE), parse_config({"store": "http://nowhere"})
    opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, None, {}, True, None)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(CudaPages, failing, fail)
        assert not opening.start(config, quantiser).takes_code
    assert own_metric("sgl_kvfetch_left_to_cpu", work="restore") == 1
    assert not pages._inverses  # memory may be short
    assert opening.start(config, quantiser).takes_code
    assert own_metric("sgl_kvfetch_left_to_cpu", work="restore") == 0


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_read_after_they_are_computed(seed: int) -> None:
    device = FakeDevice(seed)
    pages = make_pages(device)
    device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # of a chunked prefill; SGLang does not wait for it
    read = read_pages(pages.open_reads(slots_of(PLACES)), len(PLACES))
    assert [values.shape for values in read] == [(8, 4, 4, 2, 48), (8, 4, 4, 2, 64)]
    assert all(bool((values == 3.0).all()) for values in read)


@pytest.mark.parametrize("is_read", [True, False])
def test_the_memory_goes_only_when_the_device_has_ended_all_loads_and_reads(is_read: bool) -> None:
    """SGLang unmaps the pool then: what runs later would be an illegal access."""
    device, is_done = FakeDevice(), list[bool]()
    pages = make_pages(device)
    stream = pages._reads if is_read else pages.new_stream()
    device.launch(stream, lambda: is_done.append(True))
    assert not pages.wait_until_unused(0.01)
    waiting = threading.Thread(target=lambda: is_done.append(pages.wait_until_unused(WAIT_S)))
    waiting.start()
    for _ in polls():
        device.run()
        if not waiting.is_alive():
            break
    assert is_done == [True, True]


# Pages that are quantised on their way to the store


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)
    monkeypatch.setattr(gpu_pages, "_TRIAL_TOKENS", 48)  # the interpreter takes a second for 512


@pytest.fixture
def quantiser() -> KltQuantiser:
    rope = Rope(inv_freq=tuple(10.0 ** (-i / 6) for i in range(24)), attention_scaling=1.1)
    profile = make_profile(num_layers=4, num_heads=2, cell_heads=1, head_dim=48, v_head_dim=64, rope=rope, num_sinks=2)
    return KltQuantiser(profile, target_kl=3e-5)


def prepare(pages: CudaPages, quantiser: KltQuantiser) -> None:
    pages.prepare_writes(quantiser, [place_of(quantiser.profile, key, 16) for key in quantiser.profile.cells])


@pytest.mark.slow
def test_values_that_are_not_finite_are_left_to_the_cpu(
    quantiser: KltQuantiser, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is quantised of a source that is closed."""
    pages = make_pages(FakeDevice())
    set_slots(pages, PLACES, 0.0)
    pages.layer_buffers(3)[1][slots_of(PLACES)[9], 0, 0] = torch.inf
    prepare(pages, quantiser)
    source = GuardedSource(pages.open_reads(slots_of(PLACES)))
    assert source.quantise(0, range(4), MEMORY, 0) is None
    assert source.quantise(0, range(4, 8), MEMORY, 0) is not None
    source.close()
    assert source.quantise(0, range(4, 8), MEMORY, 0) is None
    assert not caplog.records


@pytest.mark.slow
def test_shared_memory_is_pinned_as_long_as_it_is_used(
    quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is written to, and only that of the present data plane."""
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 1000)
    device = FakeDevice()
    pages = make_pages(device)
    set_slots(pages, PLACES, 0.0)
    prepare(pages, quantiser)
    opened = pages.open_reads(slots_of(PLACES))
    for shared in (MEMORY, torch.empty_like(MEMORY)):
        assert opened.quantise(0, range(2), shared, 0) is not None
        assert 0 < sum(piece.nbytes for piece in device.pinned_memory) < shared.nbytes
        assert min(piece.data_ptr() for piece in device.pinned_memory) == shared.data_ptr()
    prepare(pages, quantiser)
    assert not device.pinned_memory


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["other integers", "other exponents", "no compiler", "KVFETCH_GPU=0 is set"])
def test_without_a_trial_that_passes_the_cpu_quantises(
    quantiser: KltQuantiser, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = KltCells.quantise

    def wrong(*args: Any) -> None:
        if fault == "no compiler":
            raise RuntimeError("no compiler")
        right(*args)
        output = args[-1]
        output[slice(1, None) if fault == "other integers" else 0] += 1

    monkeypatch.setattr(KltCells, "quantise", wrong)
    monkeypatch.setenv("KVFETCH_GPU", "0" if "KVFETCH_GPU" in fault else "1")
    pages = make_pages(FakeDevice())
    caplog.set_level("INFO")
    prepare(pages, quantiser)
    assert f"{fault}\n" in caplog.text
    opened = pages.open_reads(slots_of(PLACES))
    assert not opened.num_rows
    assert opened.quantise(0, range(8), MEMORY, 0) is None


@pytest.mark.slow
def test_a_device_multiplies_with_sums_in_float32() -> None:
    """In the flags that torch has at its start, and that SGLang leaves as they are, bfloat16 would permit less."""
    asked: list[tuple[Any, ...]] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in str(function):
                asked.append((str(function), *args[2:]))
            return function(*args, **(kwargs or {}))

    with Noting():
        there = torch.empty((2, 48, 48), dtype=torch.bfloat16, device="meta")
        assert quantise_klt._product(there, there).dtype == torch.float32
    assert asked == [("aten.bmm.dtype", torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("failing", [(), (1,), range(3)], ids=["sound", "faulty once", "faulty"])
def test_what_is_stored(
    failing: Sequence[int], dtype: torch.dtype, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values go to the host only where the GPU fails, and both are in one segment. Either way, what is stored is what
    the CPU makes of the pages, but for a rounding of a few integers."""
    monkeypatch.setattr(store, "_LINGER_S", 600.0)  # whatever is written together is a segment
    monkeypatch.setattr(quantise_klt, "_SCRATCH_BYTES", 50_000)  # launches of a few cells
    use_small_model(monkeypatch)
    # If integers took more bytes than the values, as with small steps and fp8, these would be read.
    num_sinks, step = (2, 0.25) if dtype == torch.float32 else (0, 4.0)
    quantiser = KltQuantiser(make_quantiser(num_sinks=num_sinks).profile, step=step)
    config: dict[str, Any] = {"quantiser": quantiser, "codec": "ans", "num_layers": LAYERS, "dtype": dtype}
    tokens, numbers, right = prompt(0), itertools.count(), KltCells.quantise
    rig = make(**config, gpu=FakeDevice(seed=2))
    monkeypatch.setattr(plane_module, "PART_BYTES", 3 * rig.linker._pages.geometry.page_bytes)

    def quantise(*args: Any) -> None:
        if next(numbers) in failing:
            raise RuntimeError("the device is lost")
        right(*args)

    monkeypatch.setattr(KltCells, "quantise", quantise)
    with patch.object(GuardedSource, "read_into", autospec=True, side_effect=GuardedSource.read_into) as reads:
        rig.compute(tokens[: 2 * PAGE])
        rig.write_all()
        rig.stored(tokens)  # the pages behind these, in two parts
    assert next(numbers) == 3
    assert reads.call_count == len(failing)
    expected = there_and_back(quantiser, {t: page_values(tokens, t).to(dtype) for t in TENSORS})
    layers = [expected[t][:, layer].float() for t in TENSORS for layer in range(LAYERS)]
    for ours, theirs in zip(loaded(make(**config, mode="read_only"), tokens), layers, strict=True):
        found = ours.view(dtype).float()
        assert torch.equal(found[:num_sinks], theirs[:num_sinks])  # which are kept exact
        assert float(torch.isclose(found, theirs, rtol=1e-4, atol=1e-4).float().mean()) > 0.95
