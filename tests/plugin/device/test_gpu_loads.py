"""Loads into a pool on a fake GPU: they restore what the CPU does. Cells of `exact` stay coded, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
from sgl_kvfetch.protocol.arena import CELL, CHUNK, Room, StagedCode
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import (
    DECODING_TABLE_BYTES,
    FittedChunk,
    ans_decode_table,
    fitted_decode_table,
)
from sgl_kvfetch.triton_kernels.restore_klt import launch_klt
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_nvdec
from tests.codec.quant.profiles import make_profile
from tests.plugin.device import rig as device_rig
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent
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
    staged_chunks,
    use_small_model,
    written,
)
from tests.plugin.device.rig import prompt
from tests.reasons import assert_counted
from tests.test_threads import assert_threads

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """References stand for kernels, except where a test says otherwise: the interpreter takes seconds for `ans`."""
    use_small_model(monkeypatch)
    monkeypatch.setattr(runtime, "INTERPRETED", False)


class PinningDevice(FakeDevice):
    """Notes which threads pin, and how many ranges copies have, and from which memory. What is copied as pinned must
    lie in one pinned piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pinning, self.unpinning = list[str](), list[str]()
        self.num_ranges, self.copied_as = list[int](), set[bool]()  # whether as pinned

    def pin(self, memory: torch.Tensor) -> None:
        self.pinning.append(threading.current_thread().name)
        super().pin(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self.unpinning.append(threading.current_thread().name)
        super().unpin(memory)

    def copy_ranges(
        self, into: torch.Tensor, places: Any, source: torch.Tensor, begins: Any, sizes: Any, *, is_pinned: bool = True
    ) -> None:
        self.num_ranges.append(len(begins))
        self.copied_as.add(is_pinned)
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
    tokens, gpu, before, decoded, statuses = prompt(0), PinningDevice(), threading.enumerate(), list[int](), list[int]()
    config: dict[str, Any] = {"quantiser": make_quantiser(num_layers=num_layers), "num_layers": num_layers}
    expected = written(make, tokens, **config)
    rig = reader(make, gpu, **config)

    def decode(data: torch.Tensor, table: torch.Tensor, most: int, out: torch.Tensor, status: torch.Tensor) -> None:
        decoded.append(len(table))
        statuses.extend(range(status.storage_offset(), status.storage_offset() + len(status)))
        assert not out.storage_offset() % gpu_loads.ALIGNMENT
        ans_decode_table(data, table, most, out, status)

    monkeypatch.setattr(gpu_loads, "ans_decode_table", decode)
    assert_close(loaded(rig, tokens), expected)
    assert sorted(decoded) == num_decoded  # cells, of which each layer group has two
    assert len({*statuses}) == len(statuses) == sum(decoded)
    assert {*gpu.num_ranges} == {1}  # chunks that lie together are copied together
    assert_threads(before, {"kvfetch-load", "kvfetch-pin"})


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
    rig = reader(make, dtype=dtype, **config)
    assert len(staged_chunks(rig, tokens))
    found = loaded(rig, tokens)
    assert {x.dtype for x in found} == {torch.uint8}
    ours, theirs = (torch.stack(x).view(dtype).float() for x in (found, expected))
    assert len(ours.unique()) > 50
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).smallest_normal)
    assert float((ours != theirs).float().mean()) < 0.001  # sums in another order


@pytest.mark.parametrize("config", [{"codec": "hevc"}, {"codec": "zstd"}, {"levels": {"count": 3}}], ids=str)
@pytest.mark.parametrize("scratch_bytes", [LARGE, 6 << 10])
def test_integers_that_the_cpu_decodes_are_restored_on_the_gpu(
    scratch_bytes: int, config: dict[str, Any], make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    tokens = prompt(0)
    expected = written(make, tokens, **config)
    monkeypatch.setattr(gpu_loads, "ans_decode_table", pytest.fail)
    rig = reader(make, **config)
    assert staged_chunks(rig, tokens)["is_coded"][:, 0].tolist() == [0, 0, 0, 0]  # two layer groups, two heads
    assert_close(loaded(rig, tokens), expected)


def test_one_prompt_may_have_both(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_SEGMENT_TOKENS", 16)
    tokens = prompt(0)
    written(make, tokens[:16])
    expected = written(make, tokens, codec="zstd")
    rig = reader(make)
    assert staged_chunks(rig, tokens)["is_coded"][:, 0].tolist() == [1, 1, 0, 0] * 2
    assert_close(loaded(rig, tokens), expected)


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
    """Which opens them by itself. Pictures go to the host, and from there as integers to the pool."""
    gpu, nvc, asked = FakeDevice(), FakeNvc(FakeDevice()), list[int]()
    gpu.torch_device = torch.device("cpu", 0)

    def open_alone(index: int) -> Any:
        asked.append(index)
        return make_nvdec(nvc), "decoded on NVDEC"

    monkeypatch.setattr(service, "open_nvdec_alone", open_alone)
    expected = written(make, prompt(0), codec="hevc")
    assert not asked
    assert_close(loaded(reader(make, gpu, codec="hevc"), prompt(0)), expected)
    assert asked == [0]
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

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[Callable[[Callable[[], object]], object]]:
        with super().launching(stream) as launch:

            def launch_copies(work: Callable[[], object]) -> object:
                if isinstance(work, partial) and work.func is launch_klt and self.refuses_to_launch:
                    self.refuses_to_launch -= 1
                    raise RuntimeError("Triton Error [CUDA]: out of resource")
                return launch(work)

            yield launch_copies if self.refuses_to_launch else launch

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
    ("fault", "num_faults"),
    [("", 1), ("no memory left", 1), ("no memory left", 2), ("no launch", 1), ("no launch", 2)],
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
    assert gpu.lacks_memory == gpu.refuses_to_launch == 0


class RoomyDevice(FakeDevice):
    """Allocates memory that nobody touches."""

    def __init__(self, free_mib: int, most_mib: int) -> None:
        super().__init__()
        self.num_free_bytes, self._most_bytes = free_mib << 20, most_mib << 20

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        if shape[0] > self._most_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("free_mib", "most_mib", "used_mib"),
    [(80 << 10, 1 << 10, 512), (2 << 10, 1 << 10, 256), (100, 1 << 10, 64), (80 << 10, 256, 64)],
    ids=["much free", "some free", "little free", "free in pieces"],
)
def test_scratch_memory_is_a_share_of_what_is_free(
    free_mib: int, most_mib: int, used_mib: int, make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make(num_layers=LAYERS, gpu=RoomyDevice(free_mib, most_mib))
    assert f"loads use {used_mib} MiB of scratch memory on the GPU, where {free_mib} were free" in caplog.text


def test_a_gpu_without_room_for_the_scratch_memory_is_named_at_the_start(make: MakeRig) -> None:
    with pytest.raises(UnsupportedError, match=r"needs 64 MiB on the GPU .* 100 are free: lower --mem-fraction-static"):
        make(num_layers=LAYERS, gpu=RoomyDevice(100, 32))


def test_parts_share_scratch_memory_and_layers_are_read_in_whatever_order_streams_run(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the streams of copies, of kernels or of the model do not wait, some orders give wrong values."""
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", 6 << 10)  # a cell a lane
    tokens = prompt(0)
    expected = written(make, tokens)

    def is_right(seed: int, impatient: Callable[[FakeDevice, GpuLoader], Sequence[Stream]]) -> bool:
        gpu = FakeDevice(seed)
        rig = reader(make, gpu)
        request, counter = rig.arrive_staged(tokens), rig.linker.layer_done_counter
        seen, wait_until = dict[int, list[torch.Tensor]](), counter.wait_until
        for stream in impatient(gpu, loader_of(rig)):
            monkeypatch.setattr(stream, "wait_event", lambda event: None)

        def read(layer: int) -> None:
            wait_until(layer)
            buffers = rig.pool.k_buffer[layer], rig.pool.v_buffer[layer]
            gpu.launch(gpu.current_stream(), lambda: seen.update({layer: [buffer.clone() for buffer in buffers]}))

        monkeypatch.setattr(counter, "wait_until", read)
        try:
            rig.admit(request)
        except RuntimeError:  # tables that are not there yet
            return False
        gpu.run()
        if request.discard_output_reason is not None:  # wrong checksums
            return False
        slots = rig.slots_of(tokens)
        found = [seen[layer][tensor][slots] for tensor in range(2) for layer in range(LAYERS)]
        return all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(found, expected, strict=True))

    assert all(is_right(seed, lambda gpu, loader: []) for seed in range(8))
    assert not all(is_right(seed, lambda gpu, loader: [loader._copies]) for seed in range(8))
    assert not all(is_right(seed, lambda gpu, loader: [lane.stream for lane in loader._lanes]) for seed in range(8))
    assert not all(is_right(seed, lambda gpu, loader: [gpu.scheduler]) for seed in range(8))


@pytest.mark.parametrize("codec", ["ans", "zstd"])
def test_shared_memory_that_cannot_be_pinned_is_copied_all_the_same(
    codec: str, make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = PoorDevice()
    gpu.refuses_to_pin = True
    written(make, prompt(0), codec=codec)
    rig = reader(make, gpu, codec=codec)
    for _ in range(2):
        loaded(rig, prompt(0))
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
    assert not gpu.pinning
    request = rig.arrive_staged(tokens)
    loader_of(rig)._pins.submit(int).result()  # all that was asked for is pinned
    num_pinned = len(gpu.pinning)
    assert len({x.data_ptr() for x in gpu.pinned_memory}) == num_pinned > 2
    assert gpu.num_pinned_bytes < rig.served.service._prompts.arena.num_bytes
    assert_close(loaded(rig, tokens, request), expected)
    assert len(gpu.pinning) == num_pinned
    assert {name.rpartition("_")[0] for name in gpu.pinning} == {"kvfetch-pin"}
    assert gpu.copied_as == {True}
    rig.linker.close()
    assert not gpu.pinned_memory


def test_memory_that_will_be_in_use_is_pinned_from_the_start(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not pinned any more after a detach, before anything else comes. A load never unpins."""
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 4 << 10)
    monkeypatch.setattr(gpu_loads, "_FIRST_BYTES", 8 << 10)
    written(make, prompt(0))
    gpu = PinningDevice()
    rig = reader(make, gpu, memory_cache="64KiB")
    wait_until(lambda: gpu.num_pinned_bytes >= 72 << 10)
    assert gpu.num_pinned_bytes <= 80 << 10
    rig.linker.detach()
    loader = loader_of(rig)
    loader._pins.submit(int).result()  # all that was asked for is done
    assert not gpu.pinned_memory
    rig.linker.connect(rig.extra_config)
    loaded(rig, prompt(0))
    rig.linker.close()
    assert not gpu.pinned_memory
    assert {name.rpartition("_")[0] for name in gpu.unpinning} == {"kvfetch-pin"}


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
    """Pinning goes on with the next step."""
    tokens, gpu = prompt(0), PinningDevice()
    written(make, tokens)
    rig = reader(make, gpu)
    loader = loader_of(rig)
    rig.arrive_staged(tokens)
    monkeypatch.setattr(rig.linker._pages, "wait_until_unused", lambda timeout_s: True)  # nothing runs on the fake
    rig.linker.leave_gpu()
    num_pinned = len(gpu.pinning)
    pinned = loader._pins.submit(loader._memories[0].pin, 0)
    assert not pinned.done()
    assert len(gpu.pinning) == num_pinned
    rig.step()
    assert pinned.result()


def test_a_load_does_not_wait_while_other_memory_is_pinned() -> None:
    pinning, may_end = threading.Event(), threading.Event()

    class SlowDevice(FakeDevice):
        def pin(self, memory: torch.Tensor) -> None:
            if memory.data_ptr() != whole.data_ptr():
                pinning.set()
                assert may_end.wait(WAIT_S)
            super().pin(memory)

    whole = torch.zeros(2 * gpu_pages.PIECE_BYTES, dtype=torch.uint8)
    memory = gpu_pages.PinnedMemory(SlowDevice(), whole)
    into = torch.empty(64, dtype=torch.uint8)
    memory.copy_of(whole[:64], into)
    thread = threading.Thread(target=memory.pin, args=(1,))
    thread.start()
    assert pinning.wait(WAIT_S)
    memory.copy_of(whole[64:128], into)  # of the first piece, too
    assert thread.is_alive()
    may_end.set()
    thread.join()


@pytest.mark.parametrize("fault", ["no launch", "wrong integers"])
def test_after_two_loads_in_a_row_have_failed_prompts_come_as_values(
    fault: str, make: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also from a data plane that follows this one, until a store is attached again."""
    written(make, *map(prompt, range(5)))
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
    assert rig.linker._loader.restores_code


@pytest.mark.parametrize("seed", range(4))
def test_cells_are_decoded_before_the_pass_ends_that_may_still_write_their_slots(
    seed: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restoring waits for its end: SGLang frees slots while a pass may still write them."""
    tokens, decoded = prompt(0), list[int]()
    expected = written(make, tokens)
    gpu = FakeDevice(seed)
    rig = reader(make, gpu)

    def decode(*args: Any) -> None:
        ans_decode_table(*args)
        decoded.append(1)

    monkeypatch.setattr(gpu_loads, "ans_decode_table", decode)
    request = rig.arrive_staged(tokens)
    rig.load_back(request)
    slots, buffers = rig.cache.linker.private_load_indices[request.rid], [*rig.pool.k_buffer, *rig.pool.v_buffer]
    pass_ends = FakeEvent(gpu)
    gpu.forward.wait_event(pass_ends)
    gpu.launch(gpu.forward, lambda: [buffer.fill_(7.0) for buffer in buffers])
    counter = rig.linker.layer_done_counter
    index = rig.cache.ready_to_load_host_cache()
    wait_until(lambda: all(future.done() for future in counter.futures[index]))
    gpu.run(lambda: bool(decoded))
    pass_ends.is_done = True
    gpu.run()
    assert not rig.cache.finish_external_linker_loads([request])
    assert_close([buffer[slots] for buffer in buffers], expected)
    rig.cache.token_to_kv_pool_allocator.free(slots)


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
    loads = rig.linker.layer_done_counter.futures[rig.cache.ready_to_load_host_cache()]
    for layer, load in enumerate(loads):
        for fence in load.result(WAIT_S):
            gpu.run_for(fence)
        num_loaded = layer // 3 * 3 + 3 if is_coded else layer + 1
        is_there = [not bool(buffer[slots].isnan().any()) for buffer in rig.pool.k_buffer]
        assert is_there == [number < num_loaded for number in range(num_layers)]
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


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("dtype", "scratch_bytes", "max_tp_size"),
    [*((dtype, LARGE, 1) for dtype in DTYPES), (torch.bfloat16, 72 << 10, 2)],  # which is for one cell a lane
    ids=str,
)
@pytest.mark.usefixtures("_exact")
def test_coded_cells_of_exact_values_come_back_bit_for_bit(
    dtype: torch.dtype, scratch_bytes: int, max_tp_size: int, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    tokens, decoded = prompt(0), list[int]()
    expected = written(make, tokens, **exact(dtype, max_tp_size))
    rig = reader(make, **exact(dtype, max_tp_size))
    chunks = staged_chunks(rig, tokens)
    size = dtype.itemsize
    assert chunks.shape == (2 * max_tp_size, 2 * size)
    assert chunks["is_coded"][:, size - 1 :: size].all()  # exponents, of K and of V

    def decode(data: torch.Tensor, table: torch.Tensor, most: int, packed: Any, own: torch.Tensor, *args: Any) -> None:
        decoded.append(len(table))
        num_tables = int(table[:, FittedChunk._fields.index("num_tables")].sum())
        assert own.nbytes == num_tables * DECODING_TABLE_BYTES
        fitted_decode_table(data, table, most, packed, own, *args)

    monkeypatch.setattr(gpu_loads, "fitted_decode_table", decode)
    assert_same_bits(loaded(rig, tokens), expected)
    assert sum(decoded) == chunks["is_coded"].sum()


@pytest.mark.usefixtures("_exact")
def test_the_kernels_restore_exact_values_as_the_cpu_does(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(device_rig, "DIM", 8)
    expected = written(make, prompt(0, 4), **exact(torch.bfloat16))
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert_same_bits(loaded(reader(make, **exact(torch.bfloat16)), prompt(0, 4)), expected)


def test_cells_that_have_no_page_of_a_load_are_left_out_and_no_table_names_a_page_without_slots() -> None:
    cells = np.zeros(6, dtype=CELL)  # two layer groups of three spans
    cells["first_layer"], cells["table"], cells["num_pages"] = [0, 0, 0, 3, 3, 3], [0, 4, 8] * 2, 4
    tables = np.array([0, 1, 2, 3, 4, -1, 6, 5, 7, 8, 9, -1], dtype=np.int32)
    chunks = np.zeros((6, 2), dtype=CHUNK)
    chunks["start"] = np.arange(12).reshape(6, 2)
    cut = StagedCode(cells, chunks, tables, torch.empty(0, dtype=torch.uint8)).of_pages(range(4, 8))
    assert cut.chunks["start"].tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert cut.cells["table"].tolist() == [4, 8] * 2
    assert cut.page_tables.tolist() == [-1, -1, -1, -1, 0, -1, 2, 1, 3, -1, -1, -1]
    again = cut.of_pages(range(1, 3))
    assert again.cells["table"].tolist() == [4, 4]
    assert [page for page in again.page_tables if page >= 0] == [1, 0]
    assert tables[0] == 0  # which other requests share
