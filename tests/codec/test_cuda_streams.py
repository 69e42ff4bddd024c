"""Tests of our part of `torch.cuda` that need no GPU."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from sgl_kvfetch.codec.cuda_streams import Device

POOL_SIZE = 32  # torch's


def test_no_stream_of_ours_is_one_of_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: count(), -1: count()}  # torch has a pool for each priority

    def stream(device: torch.device, priority: int = 0) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=(priority, next(numbers[priority]) % POOL_SIZE))

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    gpu = torch.device("cuda", 0)
    device = Device(gpu)
    ours, sglangs = set(), set()
    for _ in range(2 * POOL_SIZE):  # SGLang creates streams before and after we do
        sglangs.add(torch.cuda.Stream(gpu).cuda_stream)
        ours.add(device.new_stream().cuda_stream)
    assert ours.isdisjoint(sglangs)
