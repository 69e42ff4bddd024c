"""Tests of the GPU path on the CPU: work is done late and in random order, as far as streams and events allow.

For each ordering rule, a test checks that some of the tried orders give wrong results without the rule.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from harness.waiting import polls
from sgl_kvfetch.codec.cuda_streams import Stream
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from tests.plugin.device.cuda_pages import (
    PLACES,
    always_and_without,
    is_set,
    make_pages,
    read_pages,
    set_slots,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


def load(pages: CudaPages, slots: torch.Tensor, stream: Stream, value: float, *, fences: bool = True) -> None:
    """Launch a write to slots, as a load does."""
    there = pages.open_load(slots)
    for fence in pages.fences() if fences else ():
        stream.wait_event(fence)

    def write() -> None:
        for layer in range(pages.geometry.num_layers):
            for buffer in pages.layer_buffers(layer):
                buffer[there] = value

    pages.device.launch(stream, write)


def test_loads_come_after_a_forward_pass_that_still_writes_the_slots() -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # its request has ended in the meantime
        load(pages, slots_of(PLACES), pages.new_stream(), 5.0, fences=fences)
        device.run()
        return is_set(pages, PLACES, 5.0)

    assert always_and_without(is_right) == (True, False)


def test_slots_are_used_after_they_are_computed() -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        slots = torch.full((32,), 500)
        device.launch(device.scheduler, lambda: slots.copy_(slots_of(PLACES)))
        load(pages, slots, pages.new_stream(), 5.0, fences=fences)
        device.run()
        return is_set(pages, PLACES, 5.0)

    assert always_and_without(is_right) == (True, False)


def test_pages_are_read_after_they_are_computed() -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # of a chunked prefill; SGLang does not wait for it
        with nullcontext() if fences else patch.object(pages, "fences", return_value=[]):
            opened = pages.open_reads(slots_of(PLACES))
        read = read_pages(opened, len(PLACES))
        assert [values.shape for values in read] == [(8, 4, 4, 2, 48), (8, 4, 4, 2, 64)]
        return all(bool((values == 3.0).all()) for values in read)

    assert always_and_without(is_right) == (True, False)


def test_pages_do_not_wait_for_the_pass_behind_which_others_are_handed_over() -> None:
    """A chunked prompt hands pages over in each pass, and the next pass is launched before they are read."""
    device = FakeDevice()
    pages = make_pages(device)
    device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))
    first = pages.open_reads(slots_of(PLACES))
    device.run()
    device.forward.wait_event(FakeEvent(device))  # the next pass, whose end never comes
    pages.open_reads(slots_of(PLACES))
    assert all(bool((values == 3.0).all()) for values in read_pages(first, len(PLACES)))


def test_writing_to_the_store_does_not_hold_up_loads() -> None:
    device = FakeDevice()
    pages = make_pages(device)
    stream = pages.new_stream()
    slots = pages.open_load(slots_of(PLACES))
    for fence in pages.fences():
        stream.wait_event(fence)
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages._reader.after(pages.fences())
    device.launch(stream, lambda: set_slots(pages, PLACES, 5.0))
    assert slots.tolist() == slots_of(PLACES).tolist()
    device.run(lambda: is_set(pages, PLACES, 5.0))


def test_the_memory_goes_only_when_the_device_has_ended_all_loads_and_reads() -> None:
    """SGLang unmaps the pool then: what runs later would be an illegal access. Loads are launched, and late."""
    device = FakeDevice()
    pages = make_pages(device)
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    load(pages, slots_of(PLACES), pages.new_stream(), 5.0)
    pages._reader.after(pages.fences())
    assert not pages.wait_until_unused(0.01)
    held: list[bool] = []

    def wait() -> None:
        assert pages.wait_until_unused(60)
        held.append(is_set(pages, PLACES, 5.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    forward_is_over.is_done = True
    device.run()
    for _ in polls():  # events that are recorded since
        if not waiting.is_alive():
            break
        device.run()
    assert held == [True]
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages._reader.after(pages.fences())
    assert not pages.wait_until_unused(0.01)
