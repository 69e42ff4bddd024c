"""Surfaces counted against a bound, over a fake of PyNvVideoCodec that knows which decoders there are."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any
from weakref import WeakSet

import pytest
import torch

from sgl_kvfetch.codecs import nvdec
from sgl_kvfetch.codecs.base import FrameDecoder
from sgl_kvfetch.codecs.hevc import HevcCodec, join_access_units, split_access_units
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.codecs.surfaces import MAX_SURFACE_BYTES, NUM_SURFACES, SurfaceBudget, surface_bytes
from sgl_kvfetch.errors import CorruptError
from tests.codecs.fake_nvdec import Decoder, FakeNvc, PacketData, Surface, make_nvdec
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
    """Whose second picture is none, as a decoder finds out."""
    first, _ = split_access_units(bitstream)
    return join_access_units([first, b"no picture"])


class CountingNvc(FakeNvc):
    """``most_bytes``: that the surfaces of 4:4:4 decoders took at once. While ``gate`` is not set, none decodes."""

    def __init__(self) -> None:
        super().__init__(FakeDevice())
        self.most_bytes = 0
        self.gate, self.at_gate = Event(), Event()
        self.gate.set()
        self._live: WeakSet[Decoder] = WeakSet()
        self._lock = Lock()

    def CreateDecoder(self, **arguments: Any) -> Decoder:
        made = super().CreateDecoder(**arguments)
        decoder = GatedDecoder(self, made._cudastream, made._stream, *made._largest)
        with self._lock:
            self._live.add(decoder)
            self.most_bytes = max(self.most_bytes, self.live_bytes)
        return decoder

    @property
    def live_bytes(self) -> int:
        return sum(NUM_SURFACES * 3 * width * height for width, height in (each._largest for each in self._live))


class GatedDecoder(Decoder):
    def Decode(self, packet: PacketData) -> list[Surface]:
        nvc = self._nvc
        assert isinstance(nvc, CountingNvc)
        nvc.at_gate.set()
        assert nvc.gate.wait(20)
        return super().Decode(packet)


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> CountingNvc:
    monkeypatch.setattr(nvdec, "_limited", nvdec.LimitedLogger(logging.getLogger(nvdec.__name__)))  # nothing was said
    return CountingNvc()


def open_decoders(nvc: FakeNvc, limit_bytes: int, count: int) -> tuple[Nvdec, list[FrameDecoder]]:
    """Of ``hevc``, each on a session."""
    engines = make_nvdec(nvc)
    engines.surfaces.limit_bytes = limit_bytes
    return engines, [engines.open_session()["hevc"] for _ in range(count)]


def is_on_device(decoder: FrameDecoder, bitstream: bytes, size: tuple[int, int] = SIZES[0]) -> bool:
    """The pixels are right in any case."""
    found = decoder.decode(bitstream, (2, *size))
    assert torch.equal(found.frames, FRAMES[size])
    assert found.host is not None
    assert torch.equal(found.host, FRAMES[size])
    return found.is_on_device


def has_decoder(decoder: FrameDecoder) -> bool:
    return decoder._session._decoder is not None  # type: ignore[attr-defined, no-any-return]


@contextmanager
def busy(nvc: CountingNvc, decoder: FrameDecoder, bitstream: bytes) -> Iterator[None]:
    """In mid-picture meanwhile. Others that have a decoder cannot decode either."""
    nvc.gate.clear()
    nvc.at_gate.clear()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(is_on_device, decoder, bitstream)
        try:
            assert nvc.at_gate.wait(20)
            yield
            assert has_decoder(decoder)
        finally:
            nvc.gate.set()
        assert future.result(20)


def test_what_is_counted() -> None:
    assert surface_bytes(3, 1920, 1080) == NUM_SURFACES * 3 * 1920 * 1080
    assert surface_bytes(1, 1920, 1080) == NUM_SURFACES * 1920 * 1080 * 3 // 2
    # As the README says.
    assert MAX_SURFACE_BYTES // surface_bytes(3, 1920, 1080) == 4
    assert MAX_SURFACE_BYTES // surface_bytes(3, 432, 240) == 86


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds(nvc: CountingNvc, coded: dict[tuple[int, int], bytes], seed: int) -> None:
    """Any sizes, on several threads, with bitstreams that are corrupt in between."""
    limit_bytes = 2 * surface_bytes(3, 320, 240)  # as large as a decoder gets that has seen all sizes
    engines, decoders = open_decoders(nvc, limit_bytes, 5)

    def work(index: int) -> list[bool]:
        choose = random.Random(10 * seed + index)
        there = []
        for _ in range(20):
            size = choose.choice(SIZES)
            if choose.random() < 0.2:
                with pytest.raises(CorruptError, match="decode"):  # NVDEC finds it, or the CPU
                    decoders[index].decode(cut(coded[size]), (2, *size))
            there.append(is_on_device(decoders[index], coded[size], size))
        return there

    with ThreadPoolExecutor(len(decoders)) as threads:
        there = [each for found in threads.map(work, range(len(decoders))) for each in found]
    assert limit_bytes // 2 < nvc.most_bytes <= limit_bytes
    assert any(there)
    assert engines.surfaces.taken_bytes == nvc.live_bytes
    # And no lock is left behind.
    assert all(is_on_device(decoder, coded[SIZES[0]]) for decoder in decoders)


def test_the_one_that_is_idle_longest_is_given_up(nvc: CountingNvc, coded: dict[tuple[int, int], bytes]) -> None:
    bitstream = coded[SIZES[0]]
    _, (a, b, c) = open_decoders(nvc, 2 * SMALL, 3)
    for decoder in (a, b, a, c):
        assert is_on_device(decoder, bitstream)
    assert [has_decoder(each) for each in (a, b, c)] == [True, False, True]
    assert is_on_device(b, bitstream)
    assert [has_decoder(each) for each in (a, b, c)] == [False, True, True]
    assert nvc.most_bytes == 2 * SMALL


def test_no_more_are_given_up_than_need_be(nvc: CountingNvc, coded: dict[tuple[int, int], bytes]) -> None:
    larger = SIZES[1]
    _, (a, b, c, d) = open_decoders(nvc, surface_bytes(3, 176, 160) + SMALL, 4)
    assert is_on_device(a, coded[SIZES[0]])
    assert is_on_device(b, coded[SIZES[0]])
    assert is_on_device(c, coded[larger], larger)
    assert [has_decoder(each) for each in (a, b, c)] == [False, True, True]
    # With one that is busy there is no room for this, and so the idle one stays.
    with busy(nvc, b, coded[SIZES[0]]):
        assert not is_on_device(d, coded[SIZES[2]], SIZES[2])
        assert has_decoder(c)
    assert is_on_device(d, coded[larger], larger)


def test_a_busy_one_is_not_given_up(
    nvc: CountingNvc, coded: dict[tuple[int, int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    engines, (a, b) = open_decoders(nvc, SMALL, 2)
    with busy(nvc, a, coded[SIZES[0]]):
        assert not is_on_device(b, coded[SIZES[0]])
        assert engines.surfaces.taken_bytes == SMALL
    assert "hevc is decoded on the CPU: busy decoders leave no room for one of 144x144" in caplog.text
    assert is_on_device(b, coded[SIZES[0]])
    assert not has_decoder(a)


def test_one_decoder_there_may_always_be(nvc: CountingNvc, coded: dict[tuple[int, int], bytes]) -> None:
    engines, (a, b) = open_decoders(nvc, 1, 2)
    for decoder in (a, b, a):
        assert is_on_device(decoder, coded[SIZES[0]])
    assert nvc.most_bytes == engines.surfaces.taken_bytes == SMALL


def test_after_it_was_given_up_a_decoder_is_no_larger_than_it_must_be(
    nvc: CountingNvc, coded: dict[tuple[int, int], bytes]
) -> None:
    large = SIZES[3]
    _, (a, b) = open_decoders(nvc, surface_bytes(3, 320, 176), 2)
    assert is_on_device(a, coded[large], large)
    assert is_on_device(b, coded[SIZES[0]])
    assert is_on_device(a, coded[SIZES[0]])
    assert [has_decoder(each) for each in (a, b)] == [True, True]


def test_after_there_was_no_room_a_decoder_is_no_larger_than_it_must_be(
    nvc: CountingNvc, coded: dict[tuple[int, int], bytes]
) -> None:
    large = SIZES[3]
    _, (a, b) = open_decoders(nvc, surface_bytes(3, 320, 176), 2)
    assert is_on_device(a, coded[large], large)
    with pytest.raises(CorruptError, match="decodes to 1 pictures"):
        a.decode(cut(coded[large]), (2, *large))
    with busy(nvc, b, coded[SIZES[0]]):
        assert not is_on_device(a, coded[SIZES[0]])  # asks for as large a one as it had
    assert is_on_device(a, coded[SIZES[0]])
    assert [has_decoder(each) for each in (a, b)] == [True, True]


@pytest.mark.parametrize("fails", ["create", "reconfigure", "decode", "extra"])
def test_all_is_given_back_after_errors(nvc: CountingNvc, coded: dict[tuple[int, int], bytes], fails: str) -> None:
    engines, (decoder,) = open_decoders(nvc, MAX_SURFACE_BYTES, 1)
    if fails == "reconfigure":
        assert is_on_device(decoder, coded[SIZES[2]], SIZES[2])
        assert engines.surfaces.taken_bytes
    nvc.fails = fails
    if fails in ("create", "reconfigure"):
        assert not is_on_device(decoder, coded[SIZES[0]])
    else:
        with pytest.raises(CorruptError):
            decoder.decode(coded[SIZES[0]], (2, *SIZES[0]))
    assert engines.surfaces.taken_bytes == nvc.live_bytes == 0
    nvc.fails = ""
    assert is_on_device(decoder, coded[SIZES[0]])


def test_a_session_that_is_nobodys_takes_nothing(nvc: CountingNvc, coded: dict[tuple[int, int], bytes]) -> None:
    """A pool that was closed."""
    engines, decoders = open_decoders(nvc, MAX_SURFACE_BYTES, 2)
    for decoder in decoders:
        assert is_on_device(decoder, coded[SIZES[0]])
    assert engines.surfaces.taken_bytes == 2 * SMALL
    del decoder, decoders[0]
    assert engines.surfaces.taken_bytes == nvc.live_bytes == SMALL


class Owner:
    """``fails``: as a decoder may that CUDA cannot wait for."""

    def __init__(self, budget: SurfaceBudget, *, fails: bool = False) -> None:
        self.lock = Lock()
        self.was_given_up = False
        self._budget = budget
        self._fails = fails

    def give_up(self) -> None:
        assert self.lock.locked()
        self.was_given_up = True
        self._budget.give_back(self)
        if self._fails:
            raise RuntimeError("CUDA error")


def test_while_one_is_given_up_its_room_is_nobody_elses() -> None:
    """Its decoder is still there."""
    budget = SurfaceBudget(100)
    seen = []

    class Watched(Owner):
        def give_up(self) -> None:
            seen.append(budget.take(third, 10))
            super().give_up()

    first, second, third = Watched(budget), Owner(budget), Owner(budget)
    assert budget.take(first, 90)
    with second.lock, third.lock:
        assert budget.take(second, 30)
        assert seen == [False]
        assert budget.taken_bytes == 30
        assert budget.take(third, 70)
        assert not second.was_given_up
    assert not first.lock.locked()


def test_an_owner_that_cannot_be_given_up_leaves_no_lock_behind() -> None:
    budget = SurfaceBudget(100)
    owners = [Owner(budget, fails=True), Owner(budget)]
    for owner in owners:
        assert budget.take(owner, 50)
    late = Owner(budget)
    with pytest.raises(RuntimeError, match="CUDA error"):
        budget.take(late, 100)
    assert not any(owner.lock.locked() for owner in owners)
    budget.give_back(late)
    assert budget.taken_bytes == 50


def test_without_a_bound_nobody_is_given_up() -> None:
    budget = SurfaceBudget(None)
    owners = [Owner(budget) for _ in range(4)]
    assert all(budget.take(owner, MAX_SURFACE_BYTES) for owner in owners)
    assert not any(owner.was_given_up for owner in owners)
    assert budget.taken_bytes == 4 * MAX_SURFACE_BYTES
