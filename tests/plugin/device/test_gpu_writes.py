"""Pages that a fake GPU quantises on their way to the store. Kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.engine import data_plane as plane_module
from sgl_kvfetch.plane import store
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages, Others, others_in
from sgl_kvfetch.plugin.device.pools import GuardedSource
from sgl_kvfetch.triton_kernels import quantise_klt
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from sgl_kvfetch.types import TENSORS
from tests.codec.quant.profiles import make_profile, place_of
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.cuda_pages import PLACES, make_pages, memory, set_slots, slots_of
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import LAYERS, loaded, make_quantiser, use_small_model
from tests.plugin.device.rig import PAGE, page_values, prompt
from tests.segments import there_and_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MEMORY = torch.empty(1 << 20, dtype=torch.uint8)  # shared, as far as reads know


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


def test_values_that_are_not_finite_are_left_to_the_cpu(
    quantiser: KltQuantiser, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is quantised of a source that is closed."""
    pages = make_pages(FakeDevice())
    set_slots(pages, PLACES, 0.0)
    memory(pages)["v"][3][slots_of(PLACES)[9], 0, 0] = torch.inf
    prepare(pages, quantiser)
    source = GuardedSource(pages.open_reads(slots_of(PLACES)))
    assert source.quantise(0, range(4), MEMORY, 0) is None
    assert source.quantise(0, range(4, 8), MEMORY, 0) is not None
    source.close()
    assert source.quantise(0, range(4, 8), MEMORY, 0) is None
    assert not caplog.records


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


@pytest.mark.parametrize("fault", ["other integers", "other exponents", "no compiler", "disabled"])
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

    if fault == "disabled":
        monkeypatch.setenv("KVFETCH_GPU", "0")
    else:
        monkeypatch.setattr(KltCells, "quantise", wrong)
    pages = make_pages(FakeDevice())
    with caplog.at_level("INFO"):
        prepare(pages, quantiser)
    said = {
        "other integers": "a trial gave 100% other integers",
        "other exponents": "a trial gave 100% other exponents",
        "disabled": "KVFETCH_GPU=0 is set",
    }
    assert f"klt is quantised on the CPU: {said.get(fault, 'RuntimeError: no compiler')}" in caplog.text
    opened = pages.open_reads(slots_of(PLACES))
    assert not opened.num_rows
    assert opened.quantise(0, range(8), MEMORY, 0) is None


def split_product(parts_type: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Multiply as cuBLAS does when it splits sums: add up parts that are rounded to a type."""

    def product(centred: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(centred.shape, dtype=parts_type)
        for x, y in zip(centred.chunk(4, dim=2), matrix.chunk(4, dim=1), strict=True):
            total += (x.float() @ y.float()).to(parts_type)
        return total.float()

    return product


@pytest.mark.parametrize("parts_type", [torch.bfloat16, torch.float32])
def test_a_trial_sees_sums_in_bfloat16(
    parts_type: torch.dtype, quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in float32 that are rounded once give nearly all of the CPU's integers, however they are split."""
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", True)
    monkeypatch.setattr(quantise_klt, "_product", split_product(parts_type))
    found: list[Others] = []

    def noted(*args: Any) -> Others:
        found.append(others_in(*args))
        return found[-1]

    monkeypatch.setattr(gpu_pages, "others_in", noted)
    coarse = KltQuantiser(quantiser.profile, step=1.0)
    prepare(make_pages(FakeDevice()), coarse)
    (others,) = found
    assert others.exponents <= 0.05
    # CPUs sum in other orders, which tips a rounding to bfloat16 now and then, and an integer hardly ever.
    assert others.integers > 0.005 if parts_type == torch.bfloat16 else others.integers < 0.001


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
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
    tokens, reads, num_quantised = prompt(0), list[range](), 0
    rig = make(**config, gpu=FakeDevice(seed=2))
    monkeypatch.setattr(plane_module, "PART_BYTES", 3 * rig.linker._pages.geometry.page_bytes)
    read, right = GuardedSource.read_into, KltCells.quantise

    def quantise(*args: Any) -> None:
        nonlocal num_quantised
        num_quantised += 1
        if num_quantised - 1 in failing:
            raise RuntimeError("the device is lost")
        right(*args)

    def noted_read(self: GuardedSource, pages: range, *args: Any) -> Any:
        reads.append(pages)
        return read(self, pages, *args)

    monkeypatch.setattr(KltCells, "quantise", quantise)
    monkeypatch.setattr(GuardedSource, "read_into", noted_read)
    rig.compute(tokens[: 2 * PAGE])
    rig.write_all()
    rig.stored(tokens)  # the pages behind these, in two parts
    assert num_quantised == 3
    assert len(reads) == len(failing)
    expected = there_and_back(quantiser, {t: page_values(tokens, t).to(dtype) for t in TENSORS})
    layers = [expected[t][:, layer].float() for t in TENSORS for layer in range(LAYERS)]
    for ours, theirs in zip(loaded(make(**config, mode="read_only"), tokens), layers, strict=True):
        found = ours.view(dtype).float()
        assert torch.equal(found[:num_sinks], theirs[:num_sinks])  # which are kept exact
        assert float(torch.isclose(found, theirs, rtol=1e-4, atol=1e-4).float().mean()) > 0.95
