"""NVDEC's sessions over a fake of PyNvVideoCodec, whose work is done late and in random order, as far as streams and
events allow."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream import nvdec
from sgl_kvfetch.codec.bitstream.base import FrameDecoder
from sgl_kvfetch.codec.bitstream.hevc import Hevc420Codec, HevcCodec, join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.nvdec import (
    MAX_SURFACE_BYTES,
    DecodeCaps,
    Nvdec,
    NvdecDecoder,
    PictureSize,
    open_nvdec,
    open_nvdec_alone,
    surface_bytes,
)
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.codec.layout.frames import TileLayout
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_caps, make_nvdec
from tests.codec.bitstream.test_codecs import pictures
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment

HEVC, HEVC420 = HevcCodec(), Hevc420Codec()
BOTH = pytest.mark.parametrize("codec", [HEVC, HEVC420], ids=lambda codec: codec.name)


FRAMES = pictures(3)
CODED = {codec.name: codec.encode(FRAMES) for codec in (HEVC, HEVC420)}


def make_decoder(nvc: FakeNvc, codec: HevcCodec = HEVC) -> FrameDecoder:
    """A session's."""
    return make_nvdec(nvc).open_session()[codec.name]


def decodes(decoder: FrameDecoder, bitstream: bytes, frames: torch.Tensor = FRAMES) -> bool:
    num_frames, _, height, width = frames.shape
    found = decoder.decode(bitstream, (num_frames, height, width))
    assert not found.on_cpu
    return torch.equal(found.frames, frames)


@BOTH
@pytest.mark.parametrize("latency_pictures", [0, 2])
def test_every_value_comes_back(codec: HevcCodec, latency_pictures: int) -> None:
    for seed in range(4):
        nvc = FakeNvc(FakeDevice(seed), latency_pictures=latency_pictures)
        assert decodes(make_decoder(nvc, codec), CODED[codec.name])


def test_there_is_one_decoder_for_each_size_and_chroma_format() -> None:
    """None is reconfigured: that would hold the interpreter lock while the driver waits."""
    nvc = FakeNvc(FakeDevice())
    session = make_nvdec(nvc).open_session()
    for height, width in ((240, 160), (144, 144), (144, 144), (240, 160), (144, 176), (240, 160)):
        frames = pictures(2, height, width)
        assert decodes(session["hevc"], HEVC.encode(frames), frames)
    for name in ("hevc420", "hevc", "hevc420"):
        assert decodes(session[name], CODED[name])
    assert nvc.sizes == [(160, 240), (144, 144), (176, 144), (144, 144)]


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("decode", "does not decode on NVDEC: RuntimeError: cuvidDecodePicture returned error 999"),
        ("missing", "decodes to 2 pictures, expected 3"),
        ("extra", "decodes to more than 3 pictures"),
    ],
)
def test_what_nvdec_gets_wrong_is_corrupt(fails: str, message: str) -> None:
    nvc = FakeNvc(FakeDevice())
    decoder = make_decoder(nvc)
    assert decodes(decoder, CODED["hevc"])
    nvc.fails = fails
    with pytest.raises(CorruptError, match=message):
        decodes(decoder, CODED["hevc"])
    nvc.fails = ""
    assert decodes(decoder, CODED["hevc"])
    assert len(nvc.sizes) == 2  # that decoder was not used again


@BOTH
def test_cut_and_foreign_bitstreams_are_corrupt(codec: HevcCodec) -> None:
    good = CODED[codec.name]
    units = [bytes(unit) for unit in split_access_units(good)]
    decoder = make_decoder(FakeNvc(FakeDevice()), codec)
    for bad in (
        good[:-9],
        b"\xff" * 100,
        join_access_units([*units[:-1], b""]),
        join_access_units([units[0], *[b"\0\0\1"] * (len(units) - 1)]),
    ):
        with pytest.raises(CorruptError):
            decodes(decoder, bad)
        assert decodes(decoder, good)
    with pytest.raises(CorruptError, match="rows and columns"):
        decodes(make_decoder(FakeNvc(FakeDevice()), codec), codec.encode(pictures(3, 152, 144)))


def test_pictures_that_nvdec_does_not_take_are_decoded_on_the_cpu() -> None:
    nvc = FakeNvc(FakeDevice())
    engines = Nvdec(nvc, nvc.device, {})
    for caps in (make_caps(max_side=136), DecodeCaps(max_width=4096, max_height=4096, max_macroblocks=80)):
        found = NvdecDecoder(engines, HEVC, caps).decode(CODED["hevc"], (3, 144, 144))
        assert found.on_cpu
        assert torch.equal(found.frames, FRAMES)
    assert not nvc.sizes


def test_a_session_keeps_its_memory_on_the_host() -> None:
    device = FakeDevice()
    decoder = make_decoder(FakeNvc(device))
    larger = pictures(4, 160, 176)
    coded = HEVC.encode(larger)
    for _ in range(10):
        assert decodes(decoder, coded, larger)
        assert decodes(decoder, CODED["hevc"])
    assert (device.num_pinned, device.num_empty) == (1, 0)  # no frames on the device


def test_planes_that_lie_as_their_frames_do_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that fills a picture: its integers are the frames' very bytes, and those are the session's."""
    heads, dim = 36, 4 * 144
    layout = TileLayout(width=144, height=144, head_rows=heads, head_cols=1, dim_rows=4, dim_cols=144)
    geometry = KVGeometry(num_layers=3, num_heads=heads, k_head_dim=dim, v_head_dim=dim, page_size=1, dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    # So few different bytes that both planes are video.
    integers = torch.randint(0, 64, (2, 1, 3, heads, 2 * dim), generator=generator, dtype=torch.uint8)
    values: dict[TensorName, torch.Tensor] = dict(zip(TENSORS, integers.view(torch.bfloat16), strict=True))
    quantiser = make_quantiser("exact")
    monkeypatch.setattr(type(quantiser), "layouts", lambda *_: dict.fromkeys(TENSORS, layout))
    segment, _ = make_segment(geometry, 1, codec="hevc", span_pages=1, values=values)
    reader = SegmentReader(segment.manifest, quantiser)
    assert {chunk.codec for chunk in reader.variant.chunks} == {"hevc"}
    nvc = FakeNvc(FakeDevice())
    session = make_nvdec(nvc).open_session()
    for cell in segment.manifest.cells():
        data = reader.chunks_in(cell, [segment.data])
        on_nvdec, on_cpu = reader.decode_cell(cell, data, session), reader.decode_cell(cell, data)
        assert all(torch.equal(x, y) for x, y in zip(on_nvdec, on_cpu, strict=True))
    assert nvc.packets


# The bound on the surfaces of all decoders

SIZES = ((144, 144), (160, 176), (240, 160), (176, 320))  # height, width
SMALL = surface_bytes(3, 144, 144)
TWO = {size: pictures(2, *size) for size in SIZES}
CODED_TWO = {size: HEVC.encode(frames) for size, frames in TWO.items()}


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    monkeypatch.setattr(nvdec, "_limited", LimitedLogger(logging.getLogger(nvdec.__name__)))  # nothing was said
    return FakeNvc(FakeDevice())


def open_decoders(nvc: FakeNvc, limit_bytes: int, count: int) -> tuple[Nvdec, list[FrameDecoder]]:
    """Return engines, and decoders of ``hevc``, each in a session of its own."""
    engines = make_nvdec(nvc)
    engines.surface_limit_bytes = limit_bytes
    return engines, [engines.open_session()["hevc"] for _ in range(count)]


def is_on_nvdec(decoder: FrameDecoder, size: tuple[int, int] = SIZES[0]) -> bool:
    """Return whether NVDEC decoded two pictures. The pixels are right in any case."""
    found = decoder.decode(CODED_TWO[size], (2, *size))
    assert torch.equal(found.frames, TWO[size])
    return not found.on_cpu


def test_the_bound_holds(nvc: FakeNvc) -> None:
    """Any sizes, on several threads, with corrupt bitstreams in between."""
    limit_bytes = 3 * surface_bytes(3, 320, 176)
    engines, decoders = open_decoders(nvc, limit_bytes, 5)

    def work(index: int) -> list[bool]:
        choose = random.Random(index)
        there = []
        for _ in range(25):
            size = choose.choice(SIZES)
            if choose.random() < 0.1:
                first, _ = split_access_units(CODED_TWO[size])
                bad = join_access_units([bytes(first), b"no picture"])
                with pytest.raises(CorruptError, match="decode"):  # NVDEC finds it, or the CPU
                    decoders[index].decode(bad, (2, *size))
            there.append(is_on_nvdec(decoders[index], size))
        return there

    with ThreadPoolExecutor(len(decoders)) as threads:
        there = [each for found in threads.map(work, range(len(decoders))) for each in found]
    assert limit_bytes // 2 < nvc.most_bytes <= limit_bytes
    assert any(there)
    assert engines.held_surface_bytes == nvc.live_bytes
    drop_decoders(engines)
    assert engines.held_surface_bytes == nvc.live_bytes == 0
    assert all(is_on_nvdec(decoder) for decoder in decoders)


def test_a_decoder_that_failed_gives_way(nvc: FakeNvc) -> None:
    engines, (decoder,) = open_decoders(nvc, 3 * SMALL, 1)
    for _ in range(40):
        nvc.fails = "decode"
        with pytest.raises(CorruptError, match="does not decode on NVDEC"):
            decoder.decode(CODED_TWO[SIZES[0]], (2, *SIZES[0]))
        nvc.fails = ""
        assert is_on_nvdec(decoder)
    assert nvc.most_bytes <= 3 * SMALL
    assert engines.held_surface_bytes == nvc.live_bytes


def test_without_room_the_cpu_decodes(nvc: FakeNvc, caplog: pytest.LogCaptureFixture) -> None:
    """One decoder there may always be, which sessions share."""
    engines, (a, b) = open_decoders(nvc, 1, 2)
    with engines.borrow_decoder(PictureSize(3, 144, 144)):
        assert not is_on_nvdec(b)
    assert "hevc is decoded on the CPU: other decoders leave no room for one of 144x144" in caplog.text
    for decoder in (a, b, a):
        assert is_on_nvdec(decoder)
    assert nvc.most_bytes == engines.held_surface_bytes == SMALL
    # An idle decoder of another size is not destroyed for this.
    assert not is_on_nvdec(a, SIZES[1])
    drop_decoders(engines)
    assert is_on_nvdec(a, SIZES[1])


def test_without_memory_the_cpu_decodes(
    nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines, (decoder,) = open_decoders(nvc, MAX_SURFACE_BYTES, 1)
    nvc.fails = "create"
    assert not is_on_nvdec(decoder)
    assert "NVDEC gave no decoder for 144x144: RuntimeError: CreateDecoder: out of memory" in caplog.text
    assert engines.held_surface_bytes == nvc.live_bytes == 0
    nvc.fails = ""
    with monkeypatch.context() as patched:
        patched.setattr(nvdec, "from_dlpack", Mock(side_effect=torch.OutOfMemoryError))
        assert not is_on_nvdec(decoder)
    assert is_on_nvdec(decoder)
    assert nvc.most_bytes == 2 * SMALL  # a decoder that has begun with a bitstream is not used again


# What is found at the start

BOTH_CAPS = {name: make_caps(num_engines=7) for name in ("hevc", "hevc420")}


def found_at_start(
    monkeypatch: pytest.MonkeyPatch, caps: dict[str, DecodeCaps], fails: str = ""
) -> tuple[Nvdec | None, str]:
    nvc = FakeNvc(FakeDevice())
    nvc.fails = fails
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", nvc)
    monkeypatch.setattr(nvdec, "decode_caps", lambda: caps)
    return open_nvdec(nvc.device)


def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found, about = found_at_start(monkeypatch, BOTH_CAPS)
    assert about == "decoded on NVDEC, 7 engines: hevc, hevc420"
    assert found is not None
    assert (found.codecs, found.num_engines) == (("hevc", "hevc420"), 7)
    for name, decoder in found.open_session().items():
        assert decodes(decoder, CODED[name])
    found, about = found_at_start(monkeypatch, {"hevc420": make_caps(num_engines=1)})
    assert found is not None
    assert list(found.open_session()) == ["hevc420"]
    assert about == ("decoded on NVDEC, 1 engines: hevc420; hevc on the CPU: its chroma format is not supported")


@pytest.mark.parametrize(
    ("caps", "fails", "reason"),
    [
        (BOTH_CAPS, "pixels", "hevc on the CPU: a trial gave other pixels"),
        (BOTH_CAPS, "decode", "hevc on the CPU: a trial failed: CorruptError: hevc bitstream does not decode on NVDEC"),
        (BOTH_CAPS, "create", "hevc on the CPU: a trial was not decoded on NVDEC"),
        ({}, "", "HEVC is decoded on the CPU: this GPU's video engines do not decode it"),
    ],
)
def test_an_nvdec_that_does_not_work_is_not_used(
    caps: dict[str, DecodeCaps], fails: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, about = found_at_start(monkeypatch, caps, fails)
    assert found is None
    assert reason in about


def test_a_process_of_its_own_uses_the_gpu_only_if_there_is_a_decoder_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    use = Mock(side_effect=AssertionError("Torch not compiled with CUDA enabled"))
    monkeypatch.setattr(torch, "zeros", use)
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    assert open_nvdec_alone(1) == (None, "HEVC is decoded on the CPU: PyNvVideoCodec is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with monkeypatch.context() as switched_off:
        switched_off.setenv("KVFETCH_GPU", "0")
        assert open_nvdec_alone(1) == (None, "HEVC is decoded on the CPU: KVFETCH_GPU=0 is set")
    use.assert_not_called()
    assert open_nvdec_alone(1)[1].startswith("HEVC is decoded on the CPU: AssertionError: Torch not compiled with CUDA")
    use.assert_called_once_with(1, device=torch.device("cuda", 1))
    assert "HEVC is decoded on the CPU: ModuleNotFoundError" in open_nvdec(FakeDevice())[1]


@BOTH
@pytest.mark.gpu
def test_on_a_gpu(codec: HevcCodec) -> None:
    torch.zeros(1, device="cuda")
    engines, about = open_nvdec(Device(torch.device("cuda", 0)))
    if engines is None or codec.name not in engines.codecs:
        pytest.skip(about)
    assert decodes(engines.open_session()[codec.name], CODED[codec.name])
