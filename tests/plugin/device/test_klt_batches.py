"""Tests of batches of cells: which cells share a launch, and that the rules of rounds hold for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.container.reader import CellFrames
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device import klt_batches
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.restore_klt import KltCell, restore_klt
from tests.plugin.device.cuda_pages import WIDE, cells_of, make_pages, make_wide, memory, slots_of
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent

PAGES = range(64)


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture(scope="module")
def cells() -> list[CellFrames]:
    """The cells of one span, as if NVDEC had decoded them: eight, of three layers and of one."""
    quantiser, segment = make_wide("klt")
    decoded = [reader.decode_frames(cell, data) for reader, cell, data in cells_of(segment, quantiser)]
    assert len(decoded) == 8
    return [replace(cell, is_on_device=(False, False, True)) for cell in decoded]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of cells of each launch. A batch waits until it is full, and has room for exact tokens."""
    numbers: list[int] = []

    def counted(cells: Sequence[KltCell], *arguments: Any) -> None:
        numbers.append(len(cells))
        restore_klt(cells, *arguments)

    monkeypatch.setattr(klt_batches, "restore_klt", counted)
    monkeypatch.setattr(klt_batches, "WAIT_S", 60.0)
    monkeypatch.setattr(klt_batches, "_MOST_BYTES", 1 << 20)
    return numbers


def open_round(device: FakeDevice) -> CudaPages:
    return make_pages(device, WIDE).open_round(slots_of(list(range(20)), 16))


def add(opened: CudaPages, cell: CellFrames, run: Callable[[Callable[[], None]], bool], pages: int = 16) -> Any:
    return opened.restore(cell, PAGES[:pages], range(pages), run)


def test_one_launch_for_all_cells_of_a_round(
    cells: list[CellFrames], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(klt_batches, "_MOST_CELLS", 8)
    device = FakeDevice()
    opened = open_round(device)
    sink = GuardedSink(opened)
    futures = [add(opened, cell, sink.run) for cell in cells]
    assert len(set(futures)) == 1
    is_finished = futures[0].result(60)
    assert not is_finished()
    opened.publish()
    seen: list[bool] = []
    device.launch(device.scheduler, lambda: seen.append(not has_poison(opened, 16)))
    device.run()
    assert launches == [8]
    assert is_finished()
    assert seen == [True]
    assert has_poison(opened, 17)


def has_poison(opened: CudaPages, num_pages: int) -> bool:
    """Return whether a value of the round's first pages was not written."""
    buffers = (*memory(opened)["k"], *memory(opened)["v"])
    return any(bool(buffer[slots_of(list(range(num_pages)), 16)].isnan().any()) for buffer in buffers)


def test_full_batches_do_not_wait(
    cells: list[CellFrames], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(klt_batches, "_MOST_CELLS", 4)
    device = FakeDevice()
    opened = open_round(device)
    sink = GuardedSink(opened)
    for future in [add(opened, cell, sink.run) for cell in cells]:
        future.result(60)
    device.run()
    assert launches == [4, 4]


def test_cells_without_room_go_into_the_next_batch(
    cells: list[CellFrames], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of another guard: each sink closes on its own."""
    monkeypatch.setattr(klt_batches, "_MOST_BYTES", 0)  # only one has room
    monkeypatch.setattr(klt_batches, "WAIT_S", 0.0)
    device = FakeDevice()
    opened = open_round(device)
    sink, other = GuardedSink(opened), GuardedSink(opened)
    futures = [add(opened, cell, guard.run) for cell, guard in zip(cells, [sink] * 7 + [other], strict=True)]
    for future in futures:
        future.result(60)
    device.run()
    assert len(launches) == 8
    assert not has_poison(opened, 16)


def test_a_closed_sink_drops_its_batch(cells: list[CellFrames], launches: list[int]) -> None:
    device = FakeDevice()
    opened = open_round(device)
    sink = GuardedSink(opened)
    future = add(opened, cells[0], sink.run)
    sink.close()
    opened._batches._batch.is_full.set()  # type: ignore[union-attr]
    is_finished = future.result(60)
    device.run()
    assert is_finished()
    assert not launches
    assert all(bool(buffer.isnan().all()) for buffer in memory(opened)["k"])


def test_a_launch_that_fails_is_told_to_all_its_cells(cells: list[CellFrames], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise UnsupportedError("no kernel")

    monkeypatch.setattr(klt_batches, "restore_klt", fail)
    monkeypatch.setattr(FakeDevice, "launch", lambda device, stream, work: work())
    opened = open_round(FakeDevice())
    with pytest.raises(UnsupportedError, match="no kernel"):
        add(opened, cells[0], GuardedSink(opened).run).result(60)


def test_frames_are_kept_until_they_are_restored(cells: list[CellFrames], launches: list[int]) -> None:
    """The device has them for the round's stream. The batch itself lets them go."""
    device = FakeDevice()
    opened = open_round(device)
    future = add(opened, cells[0], GuardedSink(opened).run)
    assert any(tensor is cells[0].parts[2] and stream is opened._restores for tensor, stream in device.used)
    opened._batches._batch.is_full.set()  # type: ignore[union-attr]
    future.result(60)
    assert opened._batches._batch is None


def on_host(cell: CellFrames) -> CellFrames:
    return replace(cell, is_on_device=(False,) * 3)


def test_cells_on_the_host_share_launches_with_the_others(
    cells: list[CellFrames], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has decoded every second one."""
    monkeypatch.setattr(klt_batches, "_MOST_CELLS", 8)
    device = FakeDevice()
    opened = open_round(device)
    sink = GuardedSink(opened)
    mixed = [on_host(cell) if i % 2 else cell for i, cell in enumerate(cells)]
    for future in [add(opened, cell, sink.run) for cell in mixed]:
        future.result(60)
    device.run()
    assert launches == [8]
    assert not has_poison(opened, 16)


def test_cells_on_the_host_leave_staging_memory_to_other_batches(cells: list[CellFrames], launches: list[int]) -> None:
    """A batch takes a quarter of it. Here that is room for two cells, and the ring for four batches: all are launched
    although a forward pass keeps the device from working."""
    device = FakeDevice()
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    num_bytes = cells[0].parts[2].nbytes
    assert all(cell.parts[2].nbytes <= num_bytes for cell in cells)
    pages = make_pages(device, WIDE, restore_buffer_bytes=2 * (2 * num_bytes + (64 << 10)))
    opened = pages.open_round(slots_of(list(range(20)), 16))
    sink = GuardedSink(opened)
    futures = [add(opened, on_host(cell), sink.run) for cell in cells]
    opened._batches._batch.is_full.set()  # type: ignore[union-attr]
    for future in futures:
        future.result(60)
    assert not launches
    forward_is_over.is_done = True
    device.run()
    assert sum(launches) == 8
    assert 3 <= len(launches) <= 5
    assert not has_poison(opened, 16)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_cell_that_does_not_fit_its_layout_keeps_no_memory(cells: list[CellFrames], is_on_device: bool) -> None:
    device = FakeDevice()
    opened = open_round(device)
    _, _, frames = cells[0].parts
    wrong = replace(cells[0], parts=(*cells[0].parts[:2], frames[:-1]), is_on_device=(False, False, is_on_device))
    with pytest.raises(ValueError, match=r"frames are .*, expected contiguous uint8"):
        add(opened, wrong, GuardedSink(opened).run).result(60)
    opened.launcher.threads.shutdown()
    assert all(region.done is not None for region in opened._restore_staging._regions)


def test_a_batch_waits_for_the_work_before_its_round(cells: list[CellFrames], launches: list[int]) -> None:
    device = FakeDevice()
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    opened = open_round(device)
    future = add(opened, cells[0], GuardedSink(opened).run)
    opened._batches._batch.is_full.set()  # type: ignore[union-attr]
    is_finished = future.result(60)
    with pytest.raises(AssertionError, match="streams wait"):
        device.run()
    assert not launches
    assert not is_finished()
    forward_is_over.is_done = True
    device.run()
    assert launches == [1]
    assert is_finished()


def test_the_table_of_pages() -> None:
    assert torch.frombuffer(bytearray(klt_batches._page_table(4, (0, 3), [7, 2])), dtype=torch.int32).tolist() == [
        7, -1, -1, 2,
    ]  # fmt: skip
