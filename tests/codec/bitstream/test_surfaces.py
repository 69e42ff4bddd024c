"""The bound on the surfaces of all decoders, over a fake PyNvVideoCodec."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream import nvdec
from sgl_kvfetch.codec.bitstream.base import FrameDecoder
from sgl_kvfetch.codec.bitstream.hevc import HevcCodec, join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.nvdec import MAX_SURFACE_BYTES, Nvdec, surface_bytes
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import LimitedLogger
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_nvdec
from tests.plugin.device.fake_streams import FakeDevice

HEVC = HevcCodec()
SIZES = ((144, 144), (160, 176), (240, 160), (176, 320))  # height, width
SMALL = surface_bytes(3, 144, 144)


def pictures(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 256, (2, 3, height, width), generator=generator, dtype=torch.uint8)


FRAMES = {size: pictures(*size) for size in SIZES}


@pytest.fixture(scope="module")
def coded() -> dict[tuple[int, int], bytes]:
    return {size: HEVC.encode(frames) for size, frames in FRAMES.items()}


def cut(bitstream: bytes) -> bytes:
    """Return a bitstream whose second picture does not decode."""
    first, _ = split_access_units(bitstream)
    return join_access_units([bytes(first), b"no picture"])


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    monkeypatch.setattr(nvdec, "_limited", LimitedLogger(logging.getLogger(nvdec.__name__)))  # nothing was said
    return FakeNvc(FakeDevice())


def open_decoders(nvc: FakeNvc, limit_bytes: int, count: int) -> tuple[Nvdec, list[FrameDecoder]]:
    """Return engines, and decoders of ``hevc``, each in a session of its own."""
    engines = make_nvdec(nvc)
    engines.surface_limit_bytes = limit_bytes
    return engines, [engines.open_session()["hevc"] for _ in range(count)]


def is_on_nvdec(decoder: FrameDecoder, bitstream: bytes, size: tuple[int, int] = SIZES[0]) -> bool:
    """Return whether NVDEC decoded the bitstream. The pixels are right in any case."""
    found = decoder.decode(bitstream, (2, *size))
    assert torch.equal(found.frames, FRAMES[size])
    return not found.on_cpu


@contextmanager
def busy(nvc: FakeNvc, decoder: FrameDecoder, bitstream: bytes) -> Iterator[None]:
    """Keep ``decoder`` in mid-picture. No other can decode on the device meanwhile."""
    nvc.gate.clear()
    nvc.at_gate.clear()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(is_on_nvdec, decoder, bitstream)
        try:
            assert nvc.at_gate.wait(20)
            yield
        finally:
            nvc.gate.set()
        assert future.result(20)


def test_the_bound_holds(nvc: FakeNvc, coded: dict[tuple[int, int], bytes]) -> None:
    """Any sizes, on several threads, with corrupt bitstreams in between."""
    limit_bytes = 3 * surface_bytes(3, 320, 176)
    engines, decoders = open_decoders(nvc, limit_bytes, 5)

    def work(index: int) -> list[bool]:
        choose = random.Random(index)
        there = []
        for _ in range(25):
            size = choose.choice(SIZES)
            if choose.random() < 0.1:
                with pytest.raises(CorruptError, match="decode"):  # NVDEC finds it, or the CPU
                    decoders[index].decode(cut(coded[size]), (2, *size))
            there.append(is_on_nvdec(decoders[index], coded[size], size))
        return there

    with ThreadPoolExecutor(len(decoders)) as threads:
        there = [each for found in threads.map(work, range(len(decoders))) for each in found]
    assert limit_bytes // 2 < nvc.most_bytes <= limit_bytes
    assert any(there)
    assert engines.held_surface_bytes == nvc.live_bytes
    drop_decoders(engines)
    assert engines.held_surface_bytes == nvc.live_bytes == 0
    assert all(is_on_nvdec(decoder, coded[SIZES[0]]) for decoder in decoders)


def test_a_decoder_that_failed_gives_way(nvc: FakeNvc, coded: dict[tuple[int, int], bytes]) -> None:
    engines, (decoder,) = open_decoders(nvc, 3 * SMALL, 1)
    for _ in range(40):
        nvc.fails = "decode"
        with pytest.raises(CorruptError, match="does not decode on NVDEC"):
            decoder.decode(coded[SIZES[0]], (2, *SIZES[0]))
        nvc.fails = ""
        assert is_on_nvdec(decoder, coded[SIZES[0]])
    assert nvc.most_bytes <= 3 * SMALL
    assert engines.held_surface_bytes == nvc.live_bytes


def test_without_room_the_cpu_decodes(
    nvc: FakeNvc, coded: dict[tuple[int, int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    engines, (a, b) = open_decoders(nvc, SMALL, 2)
    with busy(nvc, a, coded[SIZES[0]]):
        assert not is_on_nvdec(b, coded[SIZES[0]])
        assert engines.held_surface_bytes == SMALL
    assert "hevc is decoded on the CPU: other decoders leave no room for one of 144x144" in caplog.text
    assert is_on_nvdec(b, coded[SIZES[0]])
    # An idle decoder of another size is not destroyed for this.
    assert not is_on_nvdec(a, coded[SIZES[1]], SIZES[1])
    assert is_on_nvdec(a, coded[SIZES[0]])
    drop_decoders(engines)
    assert is_on_nvdec(a, coded[SIZES[1]], SIZES[1])


def test_one_decoder_there_may_always_be_and_sessions_share_it(
    nvc: FakeNvc, coded: dict[tuple[int, int], bytes]
) -> None:
    engines, (a, b) = open_decoders(nvc, 1, 2)
    for decoder in (a, b, a):
        assert is_on_nvdec(decoder, coded[SIZES[0]])
    assert nvc.most_bytes == engines.held_surface_bytes == SMALL


@pytest.mark.parametrize("fails", ["decode", "extra"])
def test_a_decoder_that_failed_is_kept_unused(nvc: FakeNvc, coded: dict[tuple[int, int], bytes], fails: str) -> None:
    engines, (decoder,) = open_decoders(nvc, MAX_SURFACE_BYTES, 1)
    nvc.fails = fails
    with pytest.raises(CorruptError):
        decoder.decode(coded[SIZES[0]], (2, *SIZES[0]))
    nvc.fails = ""
    for _ in range(2):
        assert is_on_nvdec(decoder, coded[SIZES[0]])
    assert [call[0] for call in nvc.calls] == ["CreateDecoder"] * 2
    assert engines.held_surface_bytes == nvc.live_bytes == 2 * SMALL


def test_without_memory_the_cpu_decodes(
    nvc: FakeNvc, coded: dict[tuple[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, (decoder,) = open_decoders(nvc, MAX_SURFACE_BYTES, 1)
    nvc.fails = "create"
    assert not is_on_nvdec(decoder, coded[SIZES[0]])
    assert engines.held_surface_bytes == nvc.live_bytes == 0
    nvc.fails = ""
    assert is_on_nvdec(decoder, coded[SIZES[0]])
    with monkeypatch.context() as patched:
        patched.setattr(nvdec, "from_dlpack", Mock(side_effect=torch.OutOfMemoryError))
        assert not is_on_nvdec(decoder, coded[SIZES[0]])
    assert is_on_nvdec(decoder, coded[SIZES[0]])
    assert nvc.most_bytes == 2 * SMALL  # a decoder that has begun with a bitstream is not used again
