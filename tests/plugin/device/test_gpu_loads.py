"""Loads into a pool on a fake GPU: they restore what the CPU does. Cells of `exact` stay coded, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch import metrics
from sgl_kvfetch.codec import Stream
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.objects import MAX_CHUNK_BYTES
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import service, store
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.device import gpu_loads, gpu_pages
from sgl_kvfetch.protocol.arena import CELL, CHUNK, Room, StagedCode
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import ans_decode_table
from sgl_kvfetch.triton_kernels.restore_klt import launch_klt
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_nvdec
from tests.codec.quant.profiles import make_profile
from tests.plugin.device import rig as device_rig
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import (
    DIM,
    HEADS,
    LAYERS,
    assert_close,
    code_of,
    decode_wrongly,
    loaded,
    loader_of,
    make_quantiser,
    reader,
    staged,
    use_small_model,
    written,
)
from tests.plugin.device.rig import prompt
from tests.reasons import assert_counted

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """References stand for kernels, except where a test says otherwise: the interpreter takes seconds for `ans`."""
    use_small_model(monkeypatch)
    monkeypatch.setattr(runtime, "INTERPRETED", False)


class PinningDevice(FakeDevice):
    """What is copied as pinned must lie in one pinned piece."""

    def copy_ranges(
        self, into: torch.Tensor, places: Any, source: torch.Tensor, begins: Any, sizes: Any, *, is_pinned: bool = True
    ) -> None:
        pinned = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in self.pinned_memory]
        for begin, size in zip((source.data_ptr() + begins).tolist(), sizes.tolist(), strict=True):
            assert not is_pinned or any(x <= begin and begin + size <= y for x, y in pinned), "it is not pinned"
        super().copy_ranges(into, places, source, begins, sizes, is_pinned=is_pinned)

    @property
    def num_pinned_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.pinned_memory)


@pytest.mark.parametrize(
    ("scratch_bytes", "num_layers", "num_decoded"),
    [(LARGE, LAYERS, [2, 2]), (LARGE, 15, [2, 2, 4, 8]), (6 << 10, LAYERS, [1, 1, 2])],
    ids=["", "many layers", "little scratch memory"],
)
def test_coded_cells_are_restored_on_the_gpu(
    scratch_bytes: int, num_layers: int, num_decoded: list[int], make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt in few launches, the first of them for the first layers alone."""
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(runtime, "INTERPRETED", scratch_bytes != LARGE)
    monkeypatch.setattr(device_rig, "LAYERS", num_layers)
    tokens = prompt(0)
    config: dict[str, Any] = {"quantiser": make_quantiser(num_layers=num_layers), "num_layers": num_layers}
    expected = written(make, tokens, **config)
    rig = reader(make, PinningDevice(), **config)
    with patch.object(gpu_loads, "ans_decode_table", wraps=ans_decode_table) as decode:
        assert_close(loaded(rig, tokens), expected)
    # Cells, of which each layer group has two.
    assert sorted(len(call.args[1]) for call in decode.call_args_list) == num_decoded


@pytest.mark.parametrize(
    ("dtype", "config"),
    [(torch.float8_e4m3fn, {"codec": "ans"}), (torch.float8_e5m2, {"codec": "zstd"})],
    ids=["coded", "integers"],
)
def test_slots_in_fp8_get_what_the_cpu_restores(
    dtype: torch.dtype, config: dict[str, Any], make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels of `klt`, which the interpreter runs."""
    tokens = prompt(0)
    expected = written(make, tokens, dtype=dtype, **config)
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    found = loaded(reader(make, dtype=dtype, **config), tokens)
    ours, theirs = (torch.stack(x).view(dtype).float() for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).smallest_normal)
    assert float((ours != theirs).float().mean()) < 0.001  # sums in another order


@pytest.mark.parametrize("scratch_bytes", [LARGE, 6 << 10])
def test_integers_that_the_cpu_decodes_are_restored_on_the_gpu_beside_coded_cells(
    scratch_bytes: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(store, "MAX_SEGMENT_TOKENS", 16)
    tokens = prompt(0)
    written(make, tokens[:16])
    expected = written(make, tokens, codec="zstd")
    rig = reader(make)
    request, chunks = staged(rig, tokens)
    assert chunks["is_coded"][:, 0].tolist() == [1, 1, 0, 0] * 2
    assert_close(loaded(rig, tokens, request), expected)


def test_cells_that_claim_more_bytes_than_there_is_room_for_hold_up_nobody(make: MakeRig, tmp_path: Path) -> None:
    written(make, prompt(0))
    for path in tmp_path.rglob("*.kvm"):
        manifest = decode_manifest(path.read_bytes())
        (variant,) = manifest.variants
        chunks = tuple(msgspec.structs.replace(chunk, size_bytes=MAX_CHUNK_BYTES) for chunk in variant.chunks)
        variant = msgspec.structs.replace(variant, chunks=chunks)
        path.write_bytes(msgspec.structs.replace(manifest, variants=(variant,)).encode())
    written(make, prompt(1))
    rig = reader(make)
    first, second = rig.arrive(prompt(0)), rig.arrive(prompt(1))
    rig.await_unparked(first, second)
    assert rig.admit(first, second) == [0, 32]


def test_video_is_decoded_by_the_gpus_engines_in_the_data_planes_process(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures go to the host, and from there as integers to the pool."""
    gpu, nvc = FakeDevice(), FakeNvc(FakeDevice())
    gpu.torch_device = torch.device("cpu", 0)
    monkeypatch.setattr(service, "open_nvdec_alone", lambda index: (make_nvdec(nvc), "decoded on NVDEC"))
    expected = written(make, prompt(0), codec="hevc")
    assert_close(loaded(reader(make, gpu, codec="hevc"), prompt(0)), expected)
    assert nvc.packets


def test_a_prompt_whose_tables_find_no_shared_memory_is_computed(make: MakeRig) -> None:
    tokens, full = prompt(0), Room(LARGE)
    full.allocate(LARGE)
    written(make, tokens)
    rig = reader(make)
    rig.service._prompts.room = full
    with assert_counted("fetch", Reason.NO_SLOTS):
        assert rig.fetch(tokens) == 0
    assert status._state.recent[-1].reason == Reason.NO_SLOTS


class PoorDevice(FakeDevice):
    """Has no memory left, or launches no kernels of a load, so many times. Lets no memory be pinned if told so."""

    lacks_memory = refuses_to_launch = 0
    refuses_to_pin = False

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        if self.refuses_to_launch and isinstance(work, partial) and work.func is launch_klt:
            self.refuses_to_launch -= 1
            raise RuntimeError("Triton Error [CUDA]: out of resource")
        super().launch(stream, work)

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        if self.lacks_memory:
            self.lacks_memory -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().empty(shape, stream)

    def pin(self, memory: torch.Tensor) -> None:
        if self.refuses_to_pin:
            raise RuntimeError("cudaHostRegister failed: error 2 of CUDA")
        super().pin(memory)


@pytest.mark.parametrize(
    ("fault", "num_faults"), [("", 1), ("no memory left", 1), ("no memory left", 2), ("no launch", 1), ("no launch", 2)]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_load_that_cannot_be_launched_is_launched_once_more_and_then_aborts_its_request(
    fault: str, num_faults: int, seed: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched of it is under way still, in whatever order streams run. After an abort, the CPU decodes."""
    # A cell a lane, or none.
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", 6 << 10 if fault else 512)
    tokens, gpu = prompt(0), PoorDevice(seed)
    expected = written(make, tokens)
    rig = reader(make, gpu)
    gpu.refuses_to_launch = num_faults * (fault == "no launch")
    gpu.lacks_memory = num_faults * (fault == "no memory left")
    request = rig.arrive_staged(tokens)
    if num_faults > 1 or not fault:
        with assert_counted("load", Reason.FAILED):
            rig.admit(request)
        assert request.discard_output_reason is not None
        rig.hear_plane()
        request = rig.arrive_staged(tokens)
        assert code_of(rig, request) is None
    assert_close(loaded(rig, tokens, request), expected)
    assert request.discard_output_reason is None


class RoomyDevice(FakeDevice):
    """Allocates memory that nobody touches."""

    def __init__(self, free_mib: int, most_mib: int) -> None:
        super().__init__()
        self.num_free_bytes, self._most_bytes = free_mib << 20, most_mib << 20

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        if shape[0] > self._most_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(*shape, dtype=torch.uint8)


def test_scratch_memory_is_a_share_of_what_is_free(make: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """Or less, where that is in pieces."""
    caplog.set_level("INFO")
    for free_mib, most_mib, used_mib in ((80 << 10, 1 << 10, 512), (2 << 10, 1 << 10, 256), (80 << 10, 256, 64)):
        make(num_layers=LAYERS, gpu=RoomyDevice(free_mib, most_mib))
        assert f"loads use {used_mib} MiB of scratch memory on the GPU, where {free_mib} were free" in caplog.text


def test_a_gpu_without_room_for_the_scratch_memory_is_named_at_the_start(make: MakeRig) -> None:
    with pytest.raises(UnsupportedError, match=r"needs 64 MiB on the GPU .* 100 are free: lower --mem-fraction-static"):
        make(num_layers=LAYERS, gpu=RoomyDevice(100, 32))


@pytest.mark.parametrize("seed", range(8))
def test_loads_and_passes_wait_for_each_other_in_whatever_order_streams_run(
    seed: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes before may still write the slots, parts share scratch memory, and the model reads a layer at a time."""
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", 6 << 10)  # a cell a lane
    tokens, gpu = prompt(0), FakeDevice(seed)
    expected = written(make, tokens)
    rig = reader(make, gpu)
    request, counter = rig.arrive_staged(tokens), rig.linker.layer_done_counter
    seen, wait_until = dict[int, list[torch.Tensor]](), counter.wait_until

    def read(layer: int) -> None:
        wait_until(layer)
        buffers = rig.pool.k_buffer[layer], rig.pool.v_buffer[layer]
        gpu.launch(gpu.scheduler, lambda: seen.update({layer: [buffer.clone() for buffer in buffers]}))

    monkeypatch.setattr(counter, "wait_until", read)
    for stream in (gpu.scheduler, gpu.forward):
        for work in (*[lambda: None] * 99, rig.overwrite):  # late
            gpu.launch(stream, work)
    rig.admit(request)
    gpu.run()
    assert request.discard_output_reason is None
    slots = rig.slots_of(tokens)
    assert_close([seen[layer][tensor][slots] for tensor in range(2) for layer in range(LAYERS)], expected)


def test_shared_memory_that_cannot_be_pinned_is_copied_all_the_same(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = PoorDevice()
    gpu.refuses_to_pin = True
    expected = written(make, prompt(0))
    rig = reader(make, gpu)
    for _ in range(2):
        assert_close(loaded(rig, prompt(0)), expected)
        rig.flush()
    assert caplog.text.count("shared memory cannot be pinned, so copies to the GPU are slow: cudaHostRegister") == 1


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 192)
    monkeypatch.setattr(gpu_loads, "_FIRST_BYTES", 0)


@pytest.mark.parametrize("codec", ["ans", "zstd"])
@pytest.mark.usefixtures("_small_pieces")
def test_only_the_memory_that_a_load_reads_is_pinned_and_before_it(codec: str, make: MakeRig) -> None:
    """Piece by piece, and no copy reaches from one piece into the next."""
    tokens, gpu = prompt(0), PinningDevice()
    expected = written(make, tokens, codec=codec)
    rig = reader(make, gpu, codec=codec)
    assert not gpu.pinned_memory
    request = rig.arrive_staged(tokens)
    loader_of(rig)._pins.submit(int).result()  # all that was asked for is pinned
    num_pinned = len(gpu.pinned_memory)
    assert num_pinned > 2
    assert gpu.num_pinned_bytes < rig.served.service._prompts.arena.num_bytes
    assert_close(loaded(rig, tokens, request), expected)
    assert len(gpu.pinned_memory) == num_pinned
    rig.linker.close()
    assert not gpu.pinned_memory


def test_memory_that_will_be_in_use_is_pinned_until_a_detach(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 4 << 10)
    monkeypatch.setattr(gpu_loads, "_FIRST_BYTES", 8 << 10)
    gpu = PinningDevice()
    rig = reader(make, gpu, memory_cache="64KiB")
    wait_until(lambda: gpu.num_pinned_bytes >= 72 << 10)
    assert gpu.num_pinned_bytes <= 80 << 10
    rig.linker.detach()
    loader_of(rig)._pins.submit(int).result()  # all that was asked for is done
    assert not gpu.pinned_memory


@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_may_have_prompts_of_a_data_plane_that_has_died(is_first: bool, make: MakeRig) -> None:
    """Its memory is unpinned when no load reads it. A load that comes later copies from it as from any memory."""
    written(make, *map(prompt, range(3)))
    gpu = PinningDevice()
    rig = reader(make, gpu)
    ours, later = rig.arrive_staged(prompt(0)), rig.arrive_staged(prompt(2))
    former = rig.parts.plane.memory
    rig.parts.plane._peer.running.kill()
    rig.settle(lambda: rig.parts.plane.memory is not former)
    theirs = rig.arrive_staged(prompt(1))
    assert rig.admit(*((ours, theirs) if is_first else (theirs, ours))) == [32, 32]
    loader = loader_of(rig)
    assert [memory.whole is rig.parts.plane.memory for memory in loader._memories] == [True]
    assert rig.admit(later) == [32]
    gpu.run()
    assert {request.discard_output_reason for request in (ours, theirs, later)} == {None}


@pytest.mark.usefixtures("_small_pieces")
def test_nothing_is_pinned_while_sglang_captures_graphs(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning goes on with the next step, which a paused engine makes after several updates."""
    rig = reader(make)
    loader = loader_of(rig)
    monkeypatch.setattr(rig.linker._pages, "wait_until_unused", lambda timeout_s: True)  # nothing runs on the fake
    for _ in range(2):
        rig.linker.leave_gpu()
    pinned = loader._pins.submit(loader._memories[0].pin, 0)
    with pytest.raises(TimeoutError):
        pinned.result(0.1)
    rig.step()
    assert pinned.result()


@pytest.mark.parametrize("fault", ["no launch", "wrong integers"])
def test_after_two_loads_in_a_row_have_failed_prompts_come_as_values(
    fault: str, make: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also from a data plane that follows this one, until a store is attached again."""
    written(make, *map(prompt, range(6)))
    gpu = PoorDevice()
    rig = reader(make, gpu)

    def is_aborted(seed: int, *, is_broken: bool = True) -> bool:
        gpu.refuses_to_launch = 2 * (is_broken and fault == "no launch")
        decode = decode_wrongly if is_broken and fault == "wrong integers" else ans_decode_table
        monkeypatch.setattr(gpu_loads, "ans_decode_table", decode)
        request = rig.arrive_staged(prompt(seed))
        assert rig.admit(request) == [32]
        rig.hear_plane()
        return request.discard_output_reason is not None

    assert is_aborted(0)
    assert not is_aborted(1, is_broken=False)  # one fault is no reason
    assert [is_aborted(seed) for seed in (2, 3, 4)] == [True, True, False]
    assert "2 loads in a row failed on the GPU: from now on the CPU decodes and restores" in caplog.text
    assert metrics.LEFT_TO_CPU.labels("restore")._value.get() == 1
    assert not rig.parts.plane._start.takes_code
    rig.linker.detach()
    rig.linker.connect(rig.extra_config)
    assert metrics.LEFT_TO_CPU.labels("restore")._value.get() == 0
    assert is_aborted(5)
    assert rig.linker._loader.restores_code  # one fault is no reason here, either


@pytest.mark.parametrize("is_coded", [True, False])
def test_a_layer_is_there_before_those_behind_it_are_loaded(
    is_coded: bool, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that layers compute while later ones are loaded. Cells have three layers."""
    num_layers, gpu = 9, FakeDevice()
    monkeypatch.setattr(device_rig, "LAYERS", num_layers)
    changes: dict[str, Any] = {"num_layers": num_layers}
    if is_coded:
        profile = make_profile(num_layers=num_layers, num_heads=HEADS, head_dim=DIM, cell_layers=3, cell_heads=HEADS)
        changes |= {"quantiser": KltQuantiser(profile, step=0.25), "codec": "ans"}
        monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", gpu_loads.LANES * (8 << 10))  # a layer group each
    make(**changes).stored(prompt(0))
    rig = make(**changes, gpu=gpu, mode="read_only")
    rig.overwrite()
    request = rig.arrive_staged(prompt(0))
    rig.load_back(request)
    slots = rig.cache.linker.private_load_indices[request.rid]
    index = rig.cache.ready_to_load_host_cache()
    first, *_ = [load.result(WAIT_S) for load in rig.linker.layer_done_counter.futures[index]]  # all are launched
    gpu.run(lambda: all(fence.is_done for fence in first))
    is_there = [not bool(x[slots].isnan().any()) for x in (*rig.pool.k_buffer, *rig.pool.v_buffer)]
    assert is_there[0]
    assert is_there[num_layers]
    assert not is_there[-1]
    gpu.run()
    assert not rig.cache.finish_external_linker_loads([request])
    rig.cache.token_to_kv_pool_allocator.free(slots)


# `exact`


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rig, "LAYERS", 5)
    monkeypatch.setattr(device_rig, "DIM", 32)


def exact(dtype: torch.dtype, max_tp_size: int = 1) -> dict[str, Any]:
    """Cells have both heads, or one, and the last ones two layers."""
    return {"quantiser": None, "num_layers": 5, "max_tp_size": max_tp_size, "dtype": dtype}


def bits(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "scratch_bytes", "max_tp_size"),
    [
        (torch.bfloat16, 72 << 10, 2),  # which is for one cell a lane
        *((dtype, LARGE, 1) for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_exact")
def test_coded_cells_of_exact_values_come_back_bit_for_bit(
    dtype: torch.dtype, scratch_bytes: int, max_tp_size: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    tokens, size = prompt(0), dtype.itemsize
    expected = written(make, tokens, **exact(dtype, max_tp_size))
    rig = reader(make, **exact(dtype, max_tp_size))
    request, chunks = staged(rig, tokens)
    assert chunks.shape == (2 * max_tp_size, 2 * size)
    assert chunks["is_coded"][:, size - 1 :: size].all()  # exponents, of K and of V
    assert torch.equal(bits(loaded(rig, tokens, request)), bits(expected))


@pytest.mark.usefixtures("_exact")
def test_the_kernels_restore_exact_values_as_the_cpu_does(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(device_rig, "DIM", 8)
    expected = written(make, prompt(0, 4), **exact(torch.bfloat16))
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert torch.equal(bits(loaded(reader(make, **exact(torch.bfloat16)), prompt(0, 4))), bits(expected))


def test_no_page_table_of_a_load_names_a_page_without_slots() -> None:
    cells, chunks = np.zeros(3, dtype=CELL), np.zeros((3, 2), dtype=CHUNK)
    cells["table"], cells["num_pages"] = [0, 4, 8], 4
    tables = np.array([0, 1, 2, 3, 4, -1, 6, 5, 7, 8, 9, -1], dtype=np.int32)
    cut = StagedCode(cells, chunks, tables, torch.empty(0, dtype=torch.uint8)).of_pages(range(4, 8))
    assert cut.cells["table"].tolist() == [4, 8]
    assert cut.page_tables.tolist() == [-1, -1, -1, -1, 0, -1, 2, 1, 3, -1, -1, -1]
    assert tables[0] == 0  # which other requests share
