"""Tests of the GPU path on the CPU: work is done late and in random order, as far as streams and events allow.

For each ordering rule, a test checks that some of the tried orders give wrong results without the rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from harness.waiting import polls
from sgl_kvfetch.codec.container.reader import CellFrames
from sgl_kvfetch.codec.cuda_streams import Stream
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.types import TENSORS
from tests.plugin.device.cuda_pages import (
    PLACES,
    WIDE,
    Segment,
    always_and_without,
    cells_of,
    frames_bytes,
    holds,
    is_set,
    make_pages,
    make_wide,
    restore_all,
    set_slots,
    slots_of,
    unordered,
)
from tests.plugin.device.fake_streams import ClockedDevice, ClockedStream, FakeDevice, FakeEvent

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


def restored(device: FakeDevice, decoded: list[CellFrames], publishes: bool) -> CudaPages:
    """Return pages of which a round was restored, and published or not."""
    pages = make_pages(device)
    opened = pages.open_round(slots_of(PLACES))
    restore_all(decoded, opened)
    if publishes:
        opened.publish()
    return pages


def test_a_forward_pass_sees_what_was_published(exact: Segment, decoded: list[CellFrames]) -> None:
    def is_right(seed: int, publishes: bool) -> bool:
        device = FakeDevice(seed)
        pages = restored(device, decoded, publishes)
        seen: list[bool] = []
        device.forward_pass(lambda: seen.append(holds(pages, exact, PLACES)))
        device.run()
        return seen == [True]

    assert always_and_without(is_right) == (True, False)


def test_slots_of_a_dropped_fetch_keep_the_values_of_their_next_owner(decoded: list[CellFrames]) -> None:
    def is_right(seed: int, publishes: bool) -> bool:
        device = FakeDevice(seed)
        pages = restored(device, decoded, publishes)
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


def test_the_memory_goes_only_when_the_device_has_ended_all_restores_and_reads(
    exact: Segment, decoded: list[CellFrames]
) -> None:
    """SGLang unmaps the pool then: what runs later would be an illegal access. Restores are launched, and late."""
    device = FakeDevice()
    pages = make_pages(device)
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    opened = pages.open_round(slots_of(PLACES))
    restore_all(decoded, opened)
    pages.open_reads(slots_of(PLACES))
    assert not pages.wait_until_unused(0.01)
    held: list[bool] = []

    def wait() -> None:
        assert pages.wait_until_unused(60)
        held.append(holds(pages, exact, PLACES))

    waiting = threading.Thread(target=wait)
    waiting.start()
    forward_is_over.is_done = True
    device.run()
    for _ in polls():  # events that are recorded since
        if not waiting.is_alive():
            break
        device.run()
    assert held == [True]
    pages.open_reads(slots_of(PLACES))
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages.open_reads(slots_of(PLACES))
    assert not pages.wait_until_unused(0.01)


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


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
