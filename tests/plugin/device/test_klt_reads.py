"""Pages that a GPU quantises on their way to the store. Kernels run in Triton's interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.serving import serving
from harness.waiting import wait_until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellValues, Quantised, join_parts
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.engine import data_plane as plane_module
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import Peer, Quantising, Setup
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages, Others, others_in
from sgl_kvfetch.plugin.device.pools import GuardedSource, PageRun
from sgl_kvfetch.protocol.messages import Start
from sgl_kvfetch.triton_kernels import quantise_klt
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from sgl_kvfetch.types import TENSORS
from tests.codec.quant.profiles import make_profile, place_of, values_of
from tests.plugin.device.cuda_pages import GEOMETRY, PLACES, make_pages, slots_of, stored
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.planes import Served
from tests.segments import make_heads, page_hashes

pytestmark = pytest.mark.slow

ROPE = Rope(inv_freq=tuple(10.0 ** (-i / 6) for i in range(24)), attention_scaling=1.1)
TARGET_KL = 3e-5
NUM_TOKENS = len(PLACES) * GEOMETRY.page_size


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)
    monkeypatch.setattr(gpu_pages, "_TRIAL_TOKENS", 48)  # the interpreter takes a second for 512


@pytest.fixture
def quantiser() -> KltQuantiser:
    profile = make_profile(num_layers=4, num_heads=2, cell_heads=1, head_dim=48, v_head_dim=64, rope=ROPE, num_sinks=2)
    return KltQuantiser(profile, TARGET_KL)


def pages_of(quantiser: KltQuantiser, first_page: int = 0, device: FakeDevice | None = None) -> CudaPages:
    """Return pages whose slots have values of these positions. Some tokens must be kept exact in some cells."""
    pages = make_pages(device or FakeDevice())
    k, v = values_of(quantiser.profile, NUM_TOKENS, first_page * GEOMETRY.page_size)
    v[7::16, 3, 1] *= 1e6
    for tensor, x in zip(TENSORS, (k, v), strict=True):
        for layer, buffer in enumerate(pages._buffers[tensor]):
            buffer[slots_of(PLACES)] = x[:, layer].bfloat16()
    profile = quantiser.profile
    pages.prepare_writes(quantiser, [place_of(profile, key, 16) for key in profile.cells])
    assert pages._klt_reads is not None
    return pages


def of_the_cpu(quantiser: KltQuantiser, pages: CudaPages, first_page: int) -> list[Quantised]:
    """Return each cell's parts as the CPU quantises them."""
    values, found = CellValues(*(stored(pages, t, PLACES) for t in TENSORS)), []
    for key in quantiser.profile.cells:
        place = place_of(quantiser.profile, key, NUM_TOKENS, first_page * GEOMETRY.page_size)
        found.append(quantiser.quantise(values.cell(place.layers, place.heads), place))
    return found


MEMORY = torch.empty(1 << 20, dtype=torch.uint8)  # shared, as far as reads know


def quantised(run: PageRun | GuardedSource, first_page: int, pages: range, offset: int = 64) -> list[Quantised] | None:
    """Quantise pages into shared memory, and return each cell's parts. Nothing else is written."""
    MEMORY.fill_(0xEE)
    exact = run.quantise(first_page, pages, MEMORY, offset)
    if exact is None:
        return None
    num_tokens, num_rows = len(pages) * GEOMETRY.page_size, run.num_rows
    end = offset + (len(num_rows) + sum(num_rows)) * num_tokens
    assert bool((MEMORY[:offset] == 0xEE).all())
    assert bool((MEMORY[end:] == 0xEE).all())
    exponents, *integers = MEMORY[offset:end].clone().view(-1, num_tokens).split((len(num_rows), *num_rows))
    return list(zip(exponents, exact, integers, strict=True))


def require(found: Sequence[Quantised] | None) -> Sequence[Quantised]:
    assert found is not None
    return found


def assert_same_but_for_ties(found: Quantised, expected: Quantised) -> None:
    assert torch.equal(found[0] == EXACT, expected[0] == EXACT)
    assert torch.equal(found[1], expected[1])
    others = found[2] != expected[2]
    assert float(others.float().mean()) < 0.01
    assert float((found[0] != expected[0]).float().mean()) < 0.05


@pytest.mark.parametrize(("first_page", "seed"), [(0, 0), (5, 1), (0, 2)])
def test_the_same_parts_as_on_the_cpu(
    quantiser: KltQuantiser, first_page: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, and in launches of a few cells."""
    monkeypatch.setattr(quantise_klt, "_SCRATCH_BYTES", 50_000)
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 1000)
    device = FakeDevice(seed)
    pages = pages_of(quantiser, first_page, device)
    opened = pages.open_reads(slots_of(PLACES))
    pieces = [quantised(opened, first_page, part) for part in (range(2), range(2, 3), range(3, 8))]
    assert 0 < sum(x.nbytes for x in device.pinned_memory) < MEMORY.nbytes
    joined = [join_parts(quantiser.parts(torch.bfloat16), each) for each in zip(*map(require, pieces), strict=True)]
    expected = of_the_cpu(quantiser, pages, first_page)
    for each, other in zip(joined, expected, strict=True):
        assert_same_but_for_ties(each, other)
    assert {int((each[0] == EXACT).sum()) for each in expected} == ({0, 2} if first_page else {2, 4})


def test_values_that_are_not_finite_are_left_to_the_cpu(
    quantiser: KltQuantiser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = pages_of(quantiser)
    pages._buffers["v"][3][slots_of(PLACES)[9], 0, 0] = torch.inf
    opened = pages.open_reads(slots_of(PLACES))
    assert quantised(opened, 0, range(4)) is None
    assert quantised(opened, 0, range(4, 8)) is not None
    assert not caplog.records


def test_shared_memory_is_pinned_as_long_as_it_is_used(quantiser: KltQuantiser) -> None:
    device = FakeDevice()
    pages = pages_of(quantiser, 0, device)
    opened = pages.open_reads(slots_of(PLACES))
    assert quantised(opened, 0, range(2)) is not None
    (first,) = device.pinned_memory
    assert first.data_ptr() == MEMORY.data_ptr()
    another = torch.empty_like(MEMORY)  # that of the next data plane
    assert opened.quantise(0, range(2), another, 0) is not None
    (second,) = device.pinned_memory
    assert second.data_ptr() == another.data_ptr()
    pages.prepare_writes(quantiser, [place_of(quantiser.profile, key, 16) for key in quantiser.profile.cells])
    assert not device.pinned_memory


def test_a_source_that_is_closed_quantises_nothing(quantiser: KltQuantiser) -> None:
    source = GuardedSource(pages_of(quantiser).open_reads(slots_of(PLACES)))
    assert quantised(source, 0, range(8)) is not None
    source.close()
    assert quantised(source, 0, range(8)) is None


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
        pages.prepare_writes(quantiser, [place_of(quantiser.profile, key, 16) for key in quantiser.profile.cells])
    said = {
        "other integers": "a trial gave 100% other integers",
        "other exponents": "a trial gave 100% other exponents",
        "disabled": "KVFETCH_GPU=0 is set",
    }
    assert f"klt is quantised on the CPU: {said.get(fault, 'RuntimeError: no compiler')}" in caplog.text
    opened = pages.open_reads(slots_of(PLACES))
    assert not opened.num_rows
    assert quantised(opened, 0, range(8)) is None


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
    places = [place_of(coarse.profile, key, 16) for key in coarse.profile.cells]
    assert coarse.forward(places[0]).matrix.dtype == torch.bfloat16
    make_pages(FakeDevice()).prepare_writes(coarse, places)
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


def test_what_is_stored(quantiser: KltQuantiser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the pages come quantised, the rest as values; both are in one segment, as the CPU makes it but for
    ties."""
    monkeypatch.setattr(plane_module, "PART_BYTES", 3 * GEOMETRY.page_bytes)  # parts of three pages
    quantiser.profile.save(tmp_path / "profile")
    pages = pages_of(quantiser)
    opened = pages.open_reads(slots_of(PLACES))
    heads, hashes, served = make_heads(GEOMETRY, quantiser), page_hashes(len(PLACES)), Served()
    # Beforehand: the data plane would cut the segment while it waits for the interpreter.
    made = {part: require(quantised(opened, 0, part)) for part in (range(3), range(3, 6))}

    def into(part: range, memory: torch.Tensor, offset: int) -> list[torch.Tensor] | None:
        if part not in made:
            return None
        exponents, exact, integers = zip(*made[part], strict=True)
        rows = torch.cat([torch.stack(exponents), *integers])
        memory[offset:][: rows.numel()].copy_(rows.flatten())
        return list(exact)

    with serving(tmp_path / "store") as url:
        settings = {
            "store": url,
            "profile": str(tmp_path / "profile"),
            "target_kl": TARGET_KL,
            "codec": "ans",
        }
        plane = DataPlane(Start(settings, heads.namespace, 0, 2, 0, None), Peer(Setup(served.launch, GEOMETRY)))
        try:
            num_queued = plane.write(
                0,
                None,
                hashes,
                range(len(PLACES)),
                GuardedSource(opened).read_into,
                quantising=Quantising(opened.num_rows, into),
            )
            assert num_queued == len(PLACES)
            wait_until(lambda: not plane._peer._room._taken)
            served.write_all()
        finally:
            plane.close()

    async def load() -> tuple[Any, bytes, list[bytes]]:
        store = LocalStore(tmp_path / "store")
        found = await store.lookup(heads.folder, hashes)
        (hit,) = found.hits
        manifest = decode_manifest(hit.manifest)
        contents = [await store.get(manifest.data_name(each)) for each in manifest.data]
        await store.close()
        return manifest, contents[0] or b"", [each or b"" for each in contents[1:]]

    manifest, data, level_data = asyncio.run(load())
    reader = SegmentReader(manifest, quantiser)
    for cell, expected in zip(manifest.cells(), of_the_cpu(quantiser, pages, 0), strict=True):
        found = reader.decode_cell(cell, reader.chunks_in(cell, [data, *level_data]))
        assert_same_but_for_ties(found, expected)
