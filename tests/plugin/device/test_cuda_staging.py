"""Tests of staging memory, with a device that works late and in random order."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.device.staging import StagingRing, needed_bytes
from tests.plugin.device.fake_streams import FakeDevice


@pytest.mark.parametrize("seed", range(8))
def test_every_upload_arrives(seed: int) -> None:
    """Buffers of any size, on several streams, many times around the ring."""
    device, generator = FakeDevice(seed), random.Random(seed)
    ring = StagingRing(device, 4096)
    streams = [device.new_stream() for _ in range(3)]
    arrived: dict[int, bool] = {}

    def check(index: int, there: torch.Tensor) -> None:
        arrived[index] = bool((there == index).all())

    for index in range(100):
        sent = torch.full((generator.choice([10, 300, 1000, 2048]),), index, dtype=torch.uint8)
        stream = generator.choice(streams)
        with ring.buffer(needed_bytes([sent]), stream) as buffer:
            (there,) = buffer.put([sent])
            device.launch(stream, buffer.upload)
            device.launch(stream, partial(check, index, there))
    device.run()
    assert arrived == dict.fromkeys(range(100), True)


def test_what_does_not_fit_is_refused() -> None:
    device = FakeDevice()
    ring = StagingRing(device, 4096)
    with (
        pytest.raises(UnsupportedError, match="4352 bytes do not fit into staging memory of 4096"),
        ring.buffer(4352, device.scheduler),
    ):
        pass
