"""Tests of the GPU path on the CPU: work is done late and in random order, as far as streams and events allow.

For each ordering rule, a test checks that some of the tried orders give wrong results without the rule.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from harness.fetching import fetch_pages
from harness.waiting import until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.manifest import Cell
from sgl_kvfetch.codec.container.reader import CellFrames, SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.restore import restore_cell, working_bytes
from sgl_kvfetch.plane.fetch.sink import GuardedSink, IsFinished
from sgl_kvfetch.plugin.device import cache
from sgl_kvfetch.plugin.device.cuda_pages import DEVICE_BYTES, CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.quant.profiles import make_profile, values_of
from tests.plugin.device.fake_streams import ClockedDevice, ClockedStream, FakeDevice, FakeEvent
from tests.segments import make_segment

pytestmark = pytest.mark.filterwarnings("ignore")

GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=48, v_head_dim=64, page_size=4, dtype="bfloat16")
# A span of 1024 tokens is three pictures or so.
WIDE = KVGeometry(num_layers=4, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=16, dtype="bfloat16")
NUM_SLOTS = 512
NUM_PAGES = 8
SEEDS = range(8)

Segment = tuple[CodedSegment, dict[TensorName, torch.Tensor]]


@pytest.fixture(autouse=True)
def reference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels' PyTorch references, because the interpreter takes far longer."""
    if request.function not in (test_by_the_kernels, test_latent_vectors):
        monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture(scope="module")
def exact() -> Segment:
    return make_segment(GEOMETRY, NUM_PAGES, span_pages=4)


@pytest.fixture(scope="module")
def decoded(exact: Segment) -> list[CellFrames]:
    return [reader.decode_frames(cell, data) for reader, cell, data in cells_of(exact, make_quantiser("exact"))]


def make_pool(geometry: KVGeometry = GEOMETRY, device: str = "cpu") -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        NUM_SLOTS,
        geometry.page_size,
        geometry.torch_dtype,
        geometry.num_heads,
        geometry.k_head_dim,
        geometry.num_layers,
        device,
        False,
        v_head_dim=geometry.v_head_dim,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    return pool


def make_pages(device: FakeDevice, geometry: KVGeometry = GEOMETRY, **sizes: Any) -> CudaPages:
    return CudaPages(make_pool(geometry), geometry.page_size, device, device.forward, **sizes)


def cells_of(segment: Segment, quantiser: Quantiser) -> Iterator[tuple[SegmentReader, Cell, memoryview]]:
    coded, _ = segment
    reader = SegmentReader(coded.manifest, quantiser)
    for cell in coded.manifest.cells():
        start, end = reader.cell_range(cell)
        yield reader, cell, memoryview(coded.data)[start:end]


def restore_all(decoded: list[CellFrames], opened: CudaPages) -> None:
    """Restore a segment's cells as a fetch does."""
    sink = GuardedSink(opened)
    launched = []
    for cell in decoded:
        first = cell.place.tokens.start // 4
        launched.append(opened.restore(cell, range(4), range(first, first + 4), sink.run))
    for each in launched:
        each.result(60)
    sink.close()


def unordered(pages: CudaPages, pool_pages: list[int]) -> CudaPages:
    """Open a round that no event orders."""
    return pages._open(slots_of(pool_pages))


def slots_of(pool_pages: list[int], page_size: int = 4) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pool_pages for i in range(page_size)])


def memory(pages: DevicePages) -> dict[TensorName, list[torch.Tensor]]:
    """Return the pool's memory, as a forward pass sees it."""
    return pages._buffers


def stored(pages: DevicePages, tensor: TensorName, pool_pages: list[int]) -> torch.Tensor:
    """Return the present values in the pool's memory, ``(tokens, layers, heads, dim)``."""
    return torch.stack([buffer[slots_of(pool_pages)] for buffer in memory(pages)[tensor]], dim=1)


def holds(pages: DevicePages, segment: Segment, pool_pages: list[int]) -> bool:
    return all(torch.equal(stored(pages, t, pool_pages), segment[1][t]) for t in TENSORS)


def set_slots(pages: DevicePages, pool_pages: list[int], value: float) -> None:
    """Overwrite slots, as a forward pass may do."""
    for buffer in (*memory(pages)["k"], *memory(pages)["v"]):
        buffer[slots_of(pool_pages)] = value


def is_set(pages: DevicePages, pool_pages: list[int], value: float) -> bool:
    return all(bool((stored(pages, t, pool_pages) == value).all()) for t in TENSORS)


def always_and_without(test: Callable[[int, bool], bool]) -> tuple[bool, bool]:
    """Return whether ``test`` holds in all orders, with the tested rule and without it."""
    return all(test(seed, True) for seed in SEEDS), all(test(seed, False) for seed in SEEDS)


PLACES = [30, 2, 7, 9, 21, 4, 11, 12]


def make_wide(name: Any) -> tuple[Quantiser, Segment]:
    """Return the quantiser and a segment with one span of 1024 tokens."""
    if name != "klt":
        quantiser = make_quantiser(name)
        return quantiser, make_segment(WIDE, 64, quantiser=quantiser, span_pages=64, first_page=64)
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)))
    profile = make_profile(num_layers=4, num_heads=4, head_dim=64, cell_heads=1, rope=rope)
    k, v = (x.to(torch.bfloat16) for x in values_of(profile, 1024, 1024))
    v[7::16] *= 1e6  # must be kept exact
    quantiser = KltQuantiser(profile, step=0.5)
    return quantiser, make_segment(WIDE, 64, quantiser=quantiser, span_pages=64, first_page=64, values={"k": k, "v": v})


def frames_bytes(cell: CellFrames) -> int:
    """Return the size of the frames that a kernel needs to restore all of a cell's K, or with klt the whole cell."""
    frames = [x for x, layout in zip(cell.parts, cell.layouts, strict=True) if layout is not None]
    return sum(x.nbytes for x in frames) // (1 if isinstance(cell.quantiser, KltQuantiser) else 2)


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_the_same_values_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    quantiser, segment = make_wide(name)
    expected = DevicePages(make_pool(WIDE), WIDE.page_size)
    cells = []
    for reader, cell, data in cells_of(segment, quantiser):
        restore_cell(
            reader,
            cell,
            data,
            {},
            span_pages=range(3, 64, 4),
            pool_pages=range(1, 17),
            sink=GuardedSink(expected),
        )
        cells.append(reader.decode_frames(cell, data))
    assert {len(cell.layers) for cell in cells} == {3, 1}
    # As frames go into a buffer: one by one, or all. Coefficients are restored all at once.
    ways = [(1, 1)] if name == "klt" else [(1, 2 * 3), (3, 2)]
    for at_once, num_writes in ways:
        device = FakeDevice()
        room = {} if name == "klt" else {"restore_buffer_bytes": at_once * frames_bytes(cells[0]) // 3 + 60_000}
        pages = make_pages(device, WIDE, **room)
        for frames in cells:
            guard = Mock(side_effect=GuardedSink(pages).run)
            opened = pages.open_round(slots_of(list(range(1, 17)), 16))
            opened.restore(frames, range(3, 64, 4), range(16), guard).result(60)
            assert guard.call_count == num_writes
        device.run()
        for tensor in TENSORS:
            for ours, theirs in zip(memory(pages)[tensor], memory(expected)[tensor], strict=True):
                if name == "klt":  # sums in another order
                    torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-5, equal_nan=True)
                else:
                    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_a_picture_larger_than_a_buffer_is_refused(decoded: list[CellFrames]) -> None:
    pages = make_pages(FakeDevice(), restore_buffer_bytes=1000)
    with pytest.raises(UnsupportedError, match=r"a frame of 2 parts, .* does not fit into buffers of 1000 bytes"):
        restore_all(decoded, unordered(pages, PLACES))


def test_coefficients_that_do_not_fit_at_once_are_refused() -> None:
    quantiser, segment = make_wide("klt")
    reader, cell, data = next(cells_of(segment, quantiser))
    frames = reader.decode_frames(cell, data)
    pages = make_pages(FakeDevice(), WIDE, restore_buffer_bytes=frames_bytes(frames) // 2)  # no room for a row
    with pytest.raises(UnsupportedError, match=r"bytes do not fit into staging memory"):
        pages.restore(frames, range(3, 64, 4), range(1, 17), GuardedSink(pages).run)


def test_a_forward_pass_sees_what_was_published(exact: Segment, decoded: list[CellFrames]) -> None:
    def is_right(seed: int, publishes: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        opened = pages.open_round(slots_of(PLACES))
        restore_all(decoded, opened)
        if publishes:
            opened.publish()
        seen: list[bool] = []
        device.forward_pass(lambda: seen.append(holds(pages, exact, PLACES)))
        device.run()
        return seen == [True]

    assert always_and_without(is_right) == (True, False)


def test_slots_of_a_dropped_fetch_keep_the_values_of_their_next_owner(decoded: list[CellFrames]) -> None:
    def is_right(seed: int, publishes: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        opened = pages.open_round(slots_of(PLACES))
        restore_all(decoded, opened)
        if publishes:
            opened.publish()
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))
        device.run()
        return is_set(pages, PLACES, 3.0)

    assert always_and_without(is_right) == (True, False)


def test_restores_come_after_a_forward_pass_that_still_writes_the_slots(
    exact: Segment, decoded: list[CellFrames]
) -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # its request has ended in the meantime
        restore_all(decoded, pages.open_round(slots_of(PLACES)) if fences else unordered(pages, PLACES))
        device.run()
        return holds(pages, exact, PLACES)

    assert always_and_without(is_right) == (True, False)


def test_pages_are_read_after_they_are_computed(exact: Segment) -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device, read_buffer_bytes=4096)  # several pieces
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # of a chunked prefill; SGLang does not wait for it
        opened = pages.open_reads(slots_of(PLACES)) if fences else unordered(pages, PLACES)
        read = [opened.read(tensor, opened.page_indices(opened._slots_there)) for tensor in TENSORS]
        assert [values.shape for values in read] == [(8, 4, 4, 2, 48), (8, 4, 4, 2, 64)]
        return all(bool((values == 3.0).all()) for values in read)

    assert always_and_without(is_right) == (True, False)


def test_slots_are_used_after_they_are_computed(exact: Segment, decoded: list[CellFrames]) -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        slots = torch.full((32,), 500)
        device.launch(device.scheduler, lambda: _copy(slots_of(PLACES), slots))
        restore_all(decoded, pages.open_round(slots) if fences else pages._open(slots))
        device.run()
        return holds(pages, exact, PLACES)

    assert always_and_without(is_right) == (True, False)


def test_cells_are_handed_over_while_sglang_computes_their_slots(exact: Segment, decoded: list[CellFrames]) -> None:
    """After a prefill the scheduler's stream waits for the forward stream: see SGLang's `shared_read_event.py`."""
    device = FakeDevice()
    pages = make_pages(device)
    early = pages.open_round(slots_of(PLACES))
    prefill_is_over = FakeEvent(device)
    device.forward.wait_event(prefill_is_over)
    device.scheduler.wait_event(device.forward.record_event())
    late = pages.open_round(slots_of([page + 40 for page in PLACES]))
    for opened in (late, early):
        assert list(opened.page_indices(opened._slots_there)) == list(range(8))
        restore_all(decoded, opened)
    device.run(lambda: holds(pages, exact, PLACES))  # the round that was opened before does not wait
    assert not holds(pages, exact, [page + 40 for page in PLACES])
    prefill_is_over.is_done = True
    device.run()
    assert holds(pages, exact, [page + 40 for page in PLACES])


@pytest.mark.parametrize("name", ["exact", "klt"])
def test_restoring_goes_on_during_a_prefill(name: str) -> None:
    """On two clocks: a prefill of 200 ms, and cells that the host hands over meanwhile, one every 10 ms. SGLang makes
    the scheduler's stream wait for the prefill at once. Only rounds that are opened after it began wait for its end."""
    quantiser, segment = make_wide(name)
    decoded = [reader.decode_frames(cell, data) for reader, cell, data in cells_of(segment, quantiser)]
    device = ClockedDevice()
    pages = make_pages(device, WIDE)
    early = pages.open_round(slots_of(list(range(16)), 16))
    device.cost_ms = 200.0
    device.forward_pass(lambda: None)
    device.cost_ms = 0.0
    device.scheduler.wait_event(device.forward.record_event())
    late = pages.open_round(slots_of(list(range(16, 32)), 16))
    device.cost_ms = 1.0  # of each kernel and each upload
    for opened in (early, late):
        device.host_ms = 0.0
        sink = GuardedSink(opened)
        for cell in decoded:
            device.host_ms += 10.0
            opened.restore(cell, range(16), range(16), sink.run).result(60)
        sink.close()
        opened.publish()
    device.cost_ms = 0.0
    began_ms: list[float] = []
    device.forward_pass(lambda: began_ms.append(cast(ClockedStream, device.forward).now_ms))
    device.run()
    ends_ms = [cast(FakeEvent, opened._restored).at_ms for opened in (early, late)]
    assert len(decoded) * 10 < ends_ms[0] < len(decoded) * 10 + 10 < 200
    assert 200 < ends_ms[1] < 300
    assert began_ms == [ends_ms[1]]  # the next pass waits for both rounds, and for nothing else


def test_the_scheduler_stream_waits_only_for_restores() -> None:
    device = FakeDevice()
    pages = make_pages(device)
    device.forward.wait_event(FakeEvent(device))
    pages.open_round(slots_of(PLACES)).publish()
    done: list[bool] = []
    device.launch(device.scheduler, lambda: done.append(True))
    device.run(lambda: bool(done))


def test_a_buffer_is_not_used_again_before_its_copy_is_done(
    exact: Segment, decoded: list[CellFrames], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = frames_bytes(decoded[0]) + 1024  # the ring holds two of these

    def is_right(seed: int, waits: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device, restore_buffer_bytes=room)
        with monkeypatch.context() as patched:
            if not waits:
                patched.setattr(FakeEvent, "synchronize", lambda event: None)
            restore_all(decoded, pages.open_round(slots_of(PLACES)))
        device.run()
        return holds(pages, exact, PLACES)

    assert always_and_without(is_right) == (True, False)


def test_restores_are_launched_while_a_forward_pass_runs(exact: Segment, decoded: list[CellFrames]) -> None:
    """Cells whose frames are on the device need little room: none waits until an earlier one is restored."""
    device = FakeDevice()
    pages = make_pages(device, restore_buffer_bytes=frames_bytes(decoded[0]))
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    opened = pages.open_round(slots_of(PLACES))
    for _ in range(10):  # waiting would fail: nothing can run
        restore_all([replace(cell, is_on_device=(True,) * len(cell.parts)) for cell in decoded], opened)
    forward_is_over.is_done = True
    device.run()
    assert holds(pages, exact, PLACES)


def test_writing_to_the_store_does_not_hold_up_restores(exact: Segment, decoded: list[CellFrames]) -> None:
    device = FakeDevice()
    pages = make_pages(device)
    opened = pages.open_round(slots_of(PLACES))
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages.open_reads(slots_of(PLACES))
    restore_all(decoded, opened)
    device.run(lambda: holds(pages, exact, PLACES))


def test_a_round_does_not_wait_for_another(exact: Segment, decoded: list[CellFrames]) -> None:
    device = FakeDevice()
    pages = make_pages(device)
    first = pages.open_round(slots_of(PLACES))
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    second = pages.open_round(slots_of([page + 40 for page in PLACES]))
    restore_all(decoded, second)
    restore_all(decoded, first)
    first.publish()
    seen: list[bool] = []
    device.launch(device.scheduler, lambda: seen.append(holds(pages, exact, PLACES)))
    device.run(lambda: bool(seen))
    assert seen == [True]


class StuckDevice(FakeDevice):
    """Its launches on ``stuck`` wait, as with a full queue or a kernel that is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: Stream | None = None
        self.is_stuck, self.go_on = threading.Event(), threading.Event()

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        if stream is self.stuck:
            self.is_stuck.set()
            assert self.go_on.wait(60)
        super().launch(stream, work)


def test_nobody_waits_for_another_rounds_launch(exact: Segment, decoded: list[CellFrames]) -> None:
    device = StuckDevice()
    pages = make_pages(device)
    restore_all(decoded, unordered(pages, PLACES))  # compiles the kernels
    stuck, free = pages.open_round(slots_of([page + 40 for page in PLACES])), pages.open_round(slots_of(PLACES))
    device.stuck = stuck._restores
    threads = [threading.Thread(target=restore_all, args=(decoded, stuck))]

    def restore_and_publish() -> None:
        restore_all(decoded, free)
        free.publish()
        stuck.publish()

    threads.append(threading.Thread(target=restore_and_publish))
    threads[0].start()
    assert device.is_stuck.wait(60)
    threads[1].start()
    threads[1].join(60)
    assert not threads[1].is_alive()
    device.go_on.set()
    threads[0].join(60)
    device.run()
    assert holds(pages, exact, PLACES)


def test_compiled_kernels_do_not_wait_for_others_to_be_compiled(decoded: list[CellFrames]) -> None:
    device = StuckDevice()
    pages = make_pages(device)
    restore_all(decoded, unordered(pages, PLACES))
    stuck = pages.open_round(slots_of(PLACES))
    device.stuck = stuck._restores
    slow = threading.Thread(target=stuck._compile_once, args=("another", lambda: None))
    slow.start()
    assert device.is_stuck.wait(60)
    ready = threading.Thread(target=restore_all, args=(decoded, unordered(pages, PLACES)))
    ready.start()
    ready.join(60)
    assert not ready.is_alive()
    device.go_on.set()
    slow.join(60)


@pytest.mark.parametrize("when", ["before", "between two pictures"])
def test_nothing_is_written_once_the_sink_is_closed(when: str) -> None:
    quantiser = make_quantiser("exact")
    segment = make_segment(WIDE, 64, span_pages=64)
    device = FakeDevice()
    pages = make_pages(device, WIDE, restore_buffer_bytes=950_000)
    reader, cell, data = next(cells_of(segment, quantiser))
    calls = iter([when != "before", False])

    def guarded(write: Callable[[], None]) -> bool:
        if is_open := next(calls):
            write()
        return is_open

    opened = pages.open_round(slots_of(list(range(1, 17)), 16))
    opened.restore(reader.decode_frames(cell, data), range(3, 64, 4), range(16), guarded)
    device.run()
    untouched = memory(pages)["k"][0].isnan().all(dim=(1, 2))
    assert untouched.sum() == (NUM_SLOTS + 16 if when == "before" else NUM_SLOTS + 16 - first_picture_tokens(reader))


def first_picture_tokens(reader: SegmentReader) -> int:
    """Return how many of the wanted tokens the first picture holds."""
    num_frames = reader.variant.layouts["k"].num_frames((1024,))
    return sum(token % num_frames == 0 for page in range(3, 64, 4) for token in range(page * 16, page * 16 + 16))


async def test_a_fetch_from_end_to_end(exact: Segment, tmp_path: Path) -> None:
    """Decode threads and the device run at the same time."""
    coded, _ = exact
    store = LocalStore(tmp_path)
    await store.put(coded.data_name, coded.data)
    reader = SegmentReader(coded.manifest, make_quantiser("exact"))
    device = FakeDevice()
    pages = make_pages(device)
    with closing(DecodePool[Decoders]([{}] * 2)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=2000, inflight_bytes=10_000, may_delete=True)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        opened = pages.open_round(slots_of(PLACES))
        result = await fetch_pages(fetcher, sources, range(NUM_PAGES), GuardedSink(opened), 20)
    await store.close()
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    opened.publish()
    seen: list[bool] = []
    device.forward_pass(lambda: seen.append(holds(pages, exact, PLACES)))
    device.run()
    assert seen == [True]


async def test_decoded_frames_are_bounded_until_the_device_has_finished_with_them(
    exact: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, _ = exact
    store = LocalStore(tmp_path)
    await store.put(coded.data_name, coded.data)
    reader = SegmentReader(coded.manifest, make_quantiser("exact"))
    device = FakeDevice()
    prefill_is_over = FakeEvent(device)
    device.forward.wait_event(prefill_is_over)
    opened = make_pages(device).open_round(slots_of(PLACES))
    handed: list[Future[IsFinished]] = []
    restore = CudaPages.restore

    def noted(*arguments: Any) -> Future[IsFinished]:
        handed.append(restore(*arguments))
        return handed[-1]

    monkeypatch.setattr(CudaPages, "restore", noted)
    size = max(working_bytes(reader, cell, opened) for cell in coded.manifest.cells())
    with closing(DecodePool[Decoders]([{}] * 2)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=2000, inflight_bytes=10_000, may_delete=True, decode_bytes=2 * size)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        fetch = asyncio.create_task(fetch_pages(fetcher, sources, range(NUM_PAGES), GuardedSink(opened), 20))
        await until(lambda: fetch.done() or (len(handed) >= 2 and bool(fetcher._decode_budget._waiting)))
        assert not fetch.done()
        assert len(handed) < 4
        prefill_is_over.is_done = True

        def is_over() -> bool:
            device.run()
            return fetch.done()

        await until(is_over)
        assert (await fetch).num_pages == NUM_PAGES
    await store.close()
    assert len(handed) == 4
    device.run()
    assert holds(opened, exact, PLACES)


def test_by_the_kernels(exact: Segment, decoded: list[CellFrames]) -> None:
    """Runs the kernels in Triton's interpreter, as all tests without a GPU do."""
    assert runtime.INTERPRETED
    device = FakeDevice()
    pages = make_pages(device)
    cell = decoded[0]
    opened = pages.open_round(slots_of(PLACES))
    opened.restore(cell, range(4), range(4), GuardedSink(opened).run)
    device.run()
    assert (cell.layers, cell.heads) == (range(3), range(2))
    for tensor in TENSORS:
        assert torch.equal(stored(pages, tensor, PLACES[:4])[:, :3], exact[1][tensor][:16, :3])


def test_latent_vectors() -> None:
    """Both parts of MLA's vectors, which are one tensor in SGLang's pool, restored by the kernels and read again."""
    geometry = KVGeometry(num_layers=4, num_heads=1, k_head_dim=16, v_head_dim=48, page_size=4, dtype="bfloat16")
    pool = MLATokenToKVPool(NUM_SLOTS, 4, torch.bfloat16, 48, 16, 4, "cpu", False)
    for buffer in pool.kv_buffer:
        buffer.fill_(float("nan"))
    device = FakeDevice()
    pages = CudaPages(pool, 4, device, device.forward)
    assert pages.geometry == geometry
    segment = make_segment(geometry, NUM_PAGES, span_pages=4)
    cells = [reader.decode_frames(cell, data) for reader, cell, data in cells_of(segment, make_quantiser("exact"))]
    restore_all(cells, pages.open_round(slots_of(PLACES)))
    device.run()
    latent, rotated = segment[1]["v"], segment[1]["k"]
    expected = torch.cat([latent, rotated], dim=-1)  # (tokens, layers, heads, dim)
    assert torch.equal(torch.stack([x[slots_of(PLACES)] for x in pool.kv_buffer], dim=1), expected)
    assert all(bool(x[slots_of([1, 5])].isnan().all()) for x in pool.kv_buffer)


def test_device_memory_of_a_fetch_is_bounded() -> None:
    assert DEVICE_BYTES < 64 << 20


def test_a_gpu_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    monkeypatch.setattr(cache, "Device", lambda _: device)
    pool = make_pool()
    caplog.clear()  # of what SGLang says of a pool
    worker = SimpleNamespace(model_runner=SimpleNamespace(forward_stream=device.forward))
    assert type(cache._open_pages(pool, 4, worker)) is DevicePages
    assert not caplog.records
    pool.device = "cuda"
    caplog.set_level("INFO")
    pages = cache._open_pages(pool, 4, worker)
    assert isinstance(pages, CudaPages)
    assert list(pages.spare_decoders) == ["ans"]
    assert "has not been run by its authors" in caplog.text
    assert "kvfetch: ans is decoded on the GPU, too" in caplog.text
    monkeypatch.setenv("KVFETCH_GPU_ANS", "0")
    pages = cache._open_pages(pool, 4, worker)
    assert isinstance(pages, CudaPages)
    assert not pages.spare_decoders
    pool.device = "xpu"
    with pytest.raises(UnsupportedError, match="device mode does not support xpu: add --enable-hierarchical-cache"):
        cache._open_pages(pool, 4, worker)


@pytest.mark.gpu
def test_on_a_gpu(exact: Segment, decoded: list[CellFrames]) -> None:
    forward = torch.cuda.Stream()
    pages = CudaPages(make_pool(device="cuda"), 4, Device(torch.device("cuda", 0)), cast(Stream, forward))
    opened = pages.open_round(slots_of(PLACES).cuda())
    restore_all(decoded, opened)
    opened.publish()
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        copies = {t: [buffer.clone() for buffer in memory(pages)[t]] for t in TENSORS}
    forward.synchronize()
    for tensor in TENSORS:
        found = torch.stack([copy.cpu()[slots_of(PLACES)] for copy in copies[tensor]], dim=1)
        assert torch.equal(found, exact[1][tensor])
        reads = pages.open_reads(slots_of(PLACES).cuda())
        assert torch.equal(reads.read(tensor, range(NUM_PAGES)).flatten(0, 1), exact[1][tensor])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
