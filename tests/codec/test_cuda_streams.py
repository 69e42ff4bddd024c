"""Tests of our part of `torch.cuda` that need no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from sgl_kvfetch.codec.cuda_streams import Device

POOL_SIZE = 32  # torch's


def test_no_stream_of_ours_is_one_of_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: count(), -1: count()}  # torch has a pool for each priority

    def stream(device: torch.device, priority: int = 0) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=(priority, next(numbers[priority]) % POOL_SIZE))

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gpu = torch.device("cuda", 0)
    device = Device(gpu)
    ours, sglangs = set(), set()
    for _ in range(2 * POOL_SIZE):  # SGLang creates streams before and after we do
        sglangs.add(torch.cuda.Stream(gpu).cuda_stream)
        ours.add(device.new_stream().cuda_stream)
    assert ours.isdisjoint(sglangs)


@pytest.mark.parametrize(
    "use",
    [
        lambda device: device.new_stream(),
        lambda device: device.current_stream(),
        lambda device: device.launch(Mock(), lambda: None),
        lambda device: device.launching(Mock()).__enter__(),
        lambda device: device.mark(Mock()),
        lambda device: device.empty((1,), Mock()),
        lambda device: device.pinned(1),
    ],
    ids=["new stream", "current stream", "launch", "launching", "mark", "empty", "pinned"],
)
def test_every_thread_uses_the_ranks_own_gpu(use: Callable[[Device], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts with GPU 0, where torch would create a context."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    monkeypatch.setattr(torch, "empty", calls.empty)
    gpu = torch.device("cuda", 3)
    device = Device(gpu)
    for _ in range(2):
        calls.reset_mock()
        thread = threading.Thread(target=lambda: (use(device), use(device)))
        thread.start()
        thread.join()
        names = [name for name, _, _ in calls.mock_calls]
        assert calls.mock_calls[0] == call.set_device(gpu)
        assert names.count("set_device") == 1
        assert len(names) > 2


@pytest.mark.parametrize("ask", ["query", "synchronize"])
def test_a_thread_that_asks_about_an_event_uses_the_ranks_own_gpu(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's thread polls events, and does nothing else with the GPU."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    gpu = torch.device("cuda", 3)
    event = Device(gpu).mark(Mock())
    calls.reset_mock()
    thread = threading.Thread(target=getattr(event, ask))
    thread.start()
    thread.join()
    assert calls.mock_calls == [call.set_device(gpu), getattr(call.Event(), ask)()]


def test_a_gpu_has_its_index() -> None:
    """Tensors name theirs, and are compared with the device."""
    with pytest.raises(AssertionError, match="cuda has no index"):
        Device(torch.device("cuda"))
    assert Device(torch.device("cuda", 1)).torch_device.index == 1
