"""Tests which pages are copied, and which are not copied again."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from harness.waiting import wait_until
from sgl_kvfetch.codec.quant.registry import make_quantiser
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_pages_are_written_only_once(rig: Rig) -> None:
    tokens = prompt(0, 12)
    rig.compute(tokens[:32])
    rig.settle()
    rig.parts.writes.inserted("again", rig.compute(tokens[:32]))
    assert not rig.cache.has_pending_cache_operations()
    rig.compute(tokens)
    assert rig.cache.has_pending_cache_operations()
    rig.settle()


def test_pages_that_were_dropped_are_written_when_they_come_again(make: MakeRig) -> None:
    rig = make(write_queue_bytes=1 << 20)
    tokens = prompt(0)
    assert rig.service.client.writer.reserve(1 << 20, 0)
    rig.compute(tokens)
    rig.settle()
    rig.service.client.writer.release(1 << 20)
    rig.assert_nothing_held()
    rig.stored(tokens)
    assert rig.fetch(tokens) == (32, 32)


def test_pages_that_the_store_lost_are_written_again(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.backend.plane.clear()
    assert rig.fetch(tokens) == (0, 0)
    rig.stored(tokens)
    assert rig.fetch(tokens) == (32, 32)


def test_pages_are_written_again_by_another_quantiser(rig: Rig) -> None:
    """Also those that SGLang has in its tree since before."""
    tokens, plane = prompt(0, 12), rig.backend.plane
    rig.compute(tokens[:32])
    rig.write_all()
    start = msgspec.structs.replace(
        plane._start,
        namespace=dataclasses.replace(plane._start.namespace, quantiser=make_quantiser("uint8").identity),
        config=plane._start.config | {"quantiser": "uint8"},
    )
    plane.prepare(lambda: (start, plane._launch))
    wait_until(lambda: plane.is_prepared)
    plane.switch()
    rig.compute(tokens)
    rig.write_all()
    rig.flush()
    assert rig.fetch(tokens) == (48, 48)


def test_pages_that_a_data_plane_may_have_lost_are_written_again(rig: Rig) -> None:
    assert rig.cache._parts is not None
    copies = rig.cache._parts.writes._copies
    rig.compute(prompt(0))
    rig.settle()
    rig.backend.plane.num_losses += 1  # as if it had been killed just now
    rig.compute(prompt(1))
    rig.settle()
    rig.compute(prompt(0))
    assert len(copies) == 1
    rig.settle()
    rig.compute(prompt(0))
    assert not copies  # only once
