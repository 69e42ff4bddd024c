"""NVENC's encoders over a recording fake of PyNvVideoCodec that makes real bitstreams."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.bitstream import nvenc, nvidia
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS, Hevc420Codec, HevcCodec, join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.nvenc import (
    CHECK_EVERY,
    NvencEncoder,
    NvencSession,
    SessionPool,
    open_encoders,
    open_nvenc,
)
from sgl_kvfetch.codec.bitstream.nvidia import (
    CapsParam,
    EncodeCaps,
    Functions,
    Guid,
    OpenParams,
    encode_caps,
    supports_size,
)
from sgl_kvfetch.codec.container.segment import SegmentReader, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.tools.encoding.transcode import Target, transcode, verify_variant
from tests.codec.bitstream.fake_nvdec import FakeNvc as FakeDecoding
from tests.codec.bitstream.fake_nvenc import FakeNvc, install, make_caps
from tests.codec.bitstream.test_nvdec import decodes, make_decoder
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import SMALL, make_heads, make_values, page_hashes

HEVC, HEVC420 = HevcCodec(), Hevc420Codec()
BOTH = pytest.mark.parametrize("codec", [HEVC, HEVC420], ids=lambda codec: codec.name)
FAILURES = ["memory", "create", "encode", "end", "missing", "order", "goes on", "no headers"]


def pictures(num_frames: int, height: int = 144, width: int = 152) -> torch.Tensor:
    """With something in them that moves, no two alike."""
    generator = torch.Generator().manual_seed(num_frames + width)
    noise = torch.randint(0, 256, (num_frames, 3, height, width), generator=generator, dtype=torch.uint8)
    noise[:, :, : height // 2] = torch.arange(width, dtype=torch.uint8)
    return noise


def make_pool(nvc: FakeNvc, num_sessions: int = 1) -> SessionPool:
    return SessionPool([NvencSession(nvc, 0, lambda: nvc.free_bytes) for _ in range(num_sessions)])


def make_encoder(
    nvc: FakeNvc, codec: HevcCodec = HEVC, pool: SessionPool | None = None, max_side: int = 8192
) -> tuple[NvencEncoder, Counter[str]]:
    events: Counter[str] = Counter()
    encoder = NvencEncoder(
        codec, make_caps(max_side=max_side), pool or make_pool(nvc), lambda event: events.update([event])
    )
    return encoder, events


def fail(nvc: FakeNvc, fails: str) -> None:
    nvc.fails = fails
    nvc.free_bytes = (100 << 20) if fails == "memory" else (2 << 30)


def comes_back(codec: HevcCodec, encoder: NvencEncoder, frames: torch.Tensor) -> bool:
    num_frames, _, height, width = frames.shape
    return torch.equal(codec.decode(encoder.encode(frames), (num_frames, height, width)), frames)


@BOTH
def test_every_value_comes_back_in_its_order(codec: HevcCodec) -> None:
    """Fewer pictures than NVENC keeps back, and more; sizes that are not whole in its coding units."""
    nvc = FakeNvc()
    encoder, events = make_encoder(nvc, codec)
    for frames in (*map(pictures, (1, 2, 6, 1)), pictures(2, 160, 176), pictures(1, 144, 144)):
        assert comes_back(codec, encoder, frames)
    assert events == {"encoded": 6, "checked": 3}
    surface = "YUV444" if codec is HEVC else "NV12"
    assert nvc.calls == [(surface, 152, 144), (surface, 176, 160), (surface, 144, 144)]  # kept as long as it fits
    assert nvc.num_open == 1


@BOTH
def test_it_is_the_codecs_own_bitstream(codec: HevcCodec) -> None:
    """NVDEC takes it unit by unit, and prefixes decode."""
    frames = pictures(3)
    bitstream = make_encoder(FakeNvc(), codec)[0].encode(frames)
    assert bitstream != codec.encode(frames)
    assert decodes(make_decoder(FakeDecoding(FakeDevice()), codec), bitstream, frames)
    if codec is HEVC:
        prefix = join_access_units([bytes(unit) for unit in split_access_units(bitstream)[:2]])
        assert torch.equal(codec.decode(prefix, (2, 144, 152)), frames[:2])


def test_frames_may_lie_anywhere() -> None:
    frames = pictures(2, 152, 144).transpose(2, 3)
    assert not frames.is_contiguous()
    assert comes_back(HEVC, make_encoder(FakeNvc())[0], frames)


@BOTH
@pytest.mark.parametrize("fails", FAILURES)
def test_what_nvenc_does_not_do_the_cpu_does(
    codec: HevcCodec, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, in the middle and at the end of a bitstream; and it is asked again later."""
    nvc = FakeNvc()
    encoder, events = make_encoder(nvc, codec)
    frames = pictures(5)
    if fails not in ("create", "memory"):
        assert comes_back(codec, encoder, frames)
    before = Counter(events)
    fail(nvc, fails)
    monkeypatch.setattr(nvenc, "_limited", LimitedLogger(nvenc.logger))
    assert encoder.encode(frames) == codec.encode(frames)
    assert events - before == {"fallback": 1}
    assert nvc.num_open == 0
    if fails == "memory":
        assert not nvc.calls
        assert "while only 100 MiB are free on the GPU" in caplog.text
    assert f"{codec.name} is encoded on the CPU: NVENC " in caplog.text
    fail(nvc, "")
    opened = len(nvc.calls)
    assert encoder.encode(frames) == codec.encode(frames)
    assert len(nvc.calls) == opened  # it is left alone for a while
    later_s = time.monotonic() + nvenc._REST_S
    monkeypatch.setattr(nvenc, "time", SimpleNamespace(monotonic=lambda: later_s))
    assert comes_back(codec, encoder, frames)
    assert nvc.num_open == 1
    assert events["fallback"] == 2


def test_sizes_that_it_does_not_take() -> None:
    nvc = FakeNvc()
    encoder, events = make_encoder(nvc, max_side=160)
    assert comes_back(HEVC, encoder, pictures(1, 168, 144))
    assert comes_back(HEVC, encoder, pictures(1, 160, 160))
    assert nvc.calls == [("YUV444", 160, 160)]
    assert events == {"fallback": 1, "encoded": 1, "checked": 1}
    caps = EncodeCaps(145, 49, 4096, 4096, max_macroblocks=90, num_engines=1)
    assert [supports_size(caps, *size) for size in ((144, 144), (152, 144), (160, 152), (4104, 56))] == [
        False,
        True,
        False,
        False,
    ]


# Sessions


def test_sessions_are_opened_when_needed_and_kept_by_kind() -> None:
    nvc = FakeNvc()
    pool = make_pool(nvc, 3)
    (first, _), (second, _) = make_encoder(nvc, HEVC, pool), make_encoder(nvc, HEVC420, pool)
    small, large = pictures(1), pictures(1, 160, 160)
    for _ in range(3):
        assert comes_back(HEVC, first, small)
        assert comes_back(HEVC420, second, small)
        assert comes_back(HEVC, first, large)
    assert nvc.calls == [("YUV444", 152, 144), ("NV12", 152, 144), ("YUV444", 160, 160)]
    assert comes_back(HEVC420, second, large)
    assert nvc.num_open == 3
    assert comes_back(HEVC420, second, small)  # the one that went was the one idle longest
    assert comes_back(HEVC, first, large)
    assert len(nvc.calls) == 4


def test_more_threads_than_sessions() -> None:
    nvc = FakeNvc()
    encoder, events = make_encoder(nvc, HEVC420, make_pool(nvc, 2))
    frames = pictures(1)
    with ThreadPoolExecutor(5) as threads:
        assert all(threads.map(lambda _: comes_back(HEVC420, encoder, frames), range(20)))
    assert nvc.most_open <= 2
    assert events["encoded"] == 20


def test_a_driver_that_allows_fewer_encoders() -> None:
    """Those that it allows are used, and the CPU beside them."""
    nvc = FakeNvc(max_open=1)
    pool = make_pool(nvc, 2)
    encoder, events = make_encoder(nvc, HEVC, pool)
    frames = pictures(1)
    with pool.session(encoder._kind(frames)) as session:
        session.encode(encoder._kind(frames), [frames[0].reshape(-1, 152).numpy()])
        assert comes_back(HEVC, encoder, frames)
    assert events == {"fallback": 1}
    for _ in range(3):
        assert comes_back(HEVC, encoder, frames)
    assert events["encoded"] == 3
    assert len(nvc.calls) == 2


# Wrong bitstreams


def test_the_first_of_a_size_is_checked_and_now_and_then_one() -> None:
    encoder, events = make_encoder(FakeNvc(), HEVC420)
    frames = pictures(1, 144, 144)
    for _ in range(CHECK_EVERY):
        encoder.encode(frames)
    assert events == {"encoded": CHECK_EVERY, "checked": 1}
    encoder.encode(frames)
    encoder.encode(pictures(1))
    assert events["checked"] == 3


@BOTH
def test_one_wrong_bitstream_ends_it(codec: HevcCodec, caplog: pytest.LogCaptureFixture) -> None:
    nvc = FakeNvc()
    pool = make_pool(nvc, 2)
    encoder, events = make_encoder(nvc, codec, pool)
    other, _ = make_encoder(nvc, HEVC, pool)
    assert comes_back(HEVC, other, pictures(1, 160, 160))
    nvc.fails = "pixels"
    assert comes_back(codec, encoder, pictures(2))
    assert events == {"checked": 1, "wrong": 1, "fallback": 1}
    assert f"is disabled: {codec.name} of 152x144: other pixels" in caplog.text
    nvc.fails = ""
    calls = len(nvc.calls)
    assert comes_back(codec, encoder, pictures(2))
    assert comes_back(HEVC, other, pictures(2))
    assert (len(nvc.calls), nvc.num_open) == (calls, 0)
    assert events["fallback"] == 2


def test_what_others_found_wrong_ends_it_too(caplog: pytest.LogCaptureFixture) -> None:
    nvc = FakeNvc()
    pool = make_pool(nvc, 2)
    encoder, events = make_encoder(nvc, HEVC, pool)
    kind = encoder._kind(pictures(1))
    with pool.session(kind) as session:
        session.encode(kind, [pictures(1)[0].reshape(-1, 152).numpy()])
        for _ in range(2):
            encoder.distrust("a segment")
        assert nvc.num_open == 1
    assert nvc.num_open == 0  # as it came back
    assert comes_back(HEVC, encoder, pictures(1))
    assert events == {"fallback": 1}
    assert caplog.text.count("a segment") == 1


def test_bitstreams_under_way_when_it_ends_are_not_used() -> None:
    nvc = FakeNvc()
    encoder, events = make_encoder(nvc)
    encode = nvc.CreateEncoder

    def create(*arguments: Any, **options: Any) -> Any:
        encoder.distrust("meanwhile")
        return encode(*arguments, **options)

    nvc.CreateEncoder = create  # type: ignore[method-assign]
    assert encoder.encode(pictures(1)) == HEVC.encode(pictures(1))
    assert events == {"fallback": 1}
    assert nvc.num_open == 0


# In segments


def test_segments_are_written_with_it() -> None:
    """A writer's, and those that ``kvfetch encode`` makes of them; what is noise goes another way."""
    nvc = FakeNvc()
    pool = make_pool(nvc)
    encoder, events = make_encoder(nvc, HEVC, pool)
    encoder420, events420 = make_encoder(nvc, HEVC420, pool)
    quantiser = make_quantiser("exact")
    values = make_values(SMALL, 4)
    by_cpu = SegmentSpec(make_heads(), quantiser, "hevc", "240p", 2)
    spec = replace(by_cpu, encoders={"hevc": encoder})
    coded = encode_segment(spec, values, 0, None, page_hashes(4))
    chunks = Counter(chunk.codec for chunk in coded.manifest.variants[0].chunks)
    assert events["encoded"] == chunks["hevc"] > 0
    assert chunks["zstd"] > 0
    assert coded.data != encode_segment(by_cpu, values, 0, None, page_hashes(4)).data
    reader = SegmentReader(coded.manifest, quantiser)
    for cell in coded.manifest.cells():
        reader.decode_cell(cell, coded.data[slice(*reader.cell_range(cell))])

    targets = [Target("hevc420", "240p"), Target("zstd", "240p")]
    made = transcode(coded.manifest, coded.data, targets, encoders={"hevc420": encoder420})
    assert events420["encoded"] == chunks["hevc"]
    for index in range(2):
        verify_variant(made.manifest, index, made.variant_data(index))


# What is found at the start


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    return install(monkeypatch)


def test_all_is_there(nvc: FakeNvc) -> None:
    encoders, about = open_nvenc(("hevc", "hevc420"), 100)
    assert about == "encoded on NVENC: hevc, hevc420"
    assert nvc.num_open == 0  # those of the trials are gone
    assert len(encoders["hevc"]._pool._idle) == 8
    assert encoders["hevc"]._pool is encoders["hevc420"]._pool
    for name, encoder in encoders.items():
        assert comes_back(HEVC_CODECS[name], encoder, pictures(2))


def test_only_420(nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvenc, "encode_caps", lambda: {"hevc420": make_caps()})
    encoders, about = open_nvenc(("hevc", "hevc420"), 1)
    assert list(encoders) == ["hevc420"]
    assert about == "encoded on NVENC: hevc420; hevc on the CPU: its chroma format is not supported"


@pytest.mark.parametrize("fails", [*FAILURES, "pixels"])
def test_an_nvenc_that_does_not_work_is_not_used(fails: str, nvc: FakeNvc) -> None:
    fail(nvc, fails)
    encoders, about = open_nvenc(("hevc", "hevc420"), 2)
    reason = "gave other pixels" if fails == "pixels" else "failed: NVENC "
    assert not encoders
    assert about.startswith(f"encoded on NVENC: nothing; hevc on the CPU: a trial {reason}")
    assert f"; hevc420 on the CPU: a trial {reason}" in about
    assert "a moment ago" not in about


def test_the_trial_is_on_a_thread_without_a_context(nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(NvencEncoder, "trial", lambda _: str(threads.append(threading.current_thread()) or ""))  # type: ignore[func-returns-value]
    open_nvenc(("hevc",), 1)
    assert threads != [threading.current_thread()]


def test_nothing_is_there(nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    assert "HEVC is encoded on the CPU: ModuleNotFoundError" in open_nvenc(("hevc",), 1)[1]
    monkeypatch.setattr(nvenc, "encode_caps", dict)
    assert "this GPU has no NVENC, or it cannot encode losslessly" in open_nvenc(("hevc",), 1)[1]

    def no_library() -> dict[str, EncodeCaps]:
        raise OSError("libnvidia-encode.so.1: cannot open shared object file")

    monkeypatch.setattr(nvenc, "encode_caps", no_library)
    assert "OSError: libnvidia-encode.so.1" in open_nvenc(("hevc",), 1)[1]
    assert not nvc.calls  # PyNvVideoCodec is left alone where there is no NVENC


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = "HEVC is encoded on the CPU: RuntimeError: there is no GPU that torch can use"
    assert open_encoders("auto", ["hevc"], 1) == ({}, reason)
    with pytest.raises(ConfigError, match="encoder = 'nvenc': " + reason):
        open_encoders("nvenc", ["hevc"], 1)


def test_what_is_asked_for(nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("auto", "nvenc"):
        encoders, about = open_encoders(choice, ["zstd", "hevc"], 1)
        assert (list(encoders), about) == (["hevc"], "encoded on NVENC: hevc")
    calls = len(nvc.calls)
    assert open_encoders("cpu", ["hevc"], 1) == ({}, "")
    assert open_encoders("auto", ["zstd"], 1) == ({}, "")
    with pytest.raises(ConfigError, match="encodes hevc and hevc420, not zstd, deflate"):
        open_encoders("nvenc", ["zstd", "deflate"], 1)
    assert len(nvc.calls) == calls
    monkeypatch.setattr(nvenc, "encode_caps", lambda: {"hevc420": make_caps()})
    with pytest.raises(ConfigError, match="hevc on the CPU: its chroma format is not supported"):
        open_encoders("nvenc", ["hevc420", "hevc"], 1)


# What the driver says


class FakeDriver:
    """libnvidia-encode and libcuda, with functions to be called as C calls them. ``opening`` is what opening a session
    returns, ``caps`` what the GPU can."""

    def __init__(self, caps: dict[int, int], opening: int = 0) -> None:
        self.calls: list[str] = []
        self._caps = caps
        self._opening = opening
        self._kept = [
            (29, nvidia._OPEN[1](self.open)),
            (7, nvidia._GET_CAPS[1](self.get)),
            (27, nvidia._DESTROY[1](self.destroy)),
        ]

    def NvEncodeAPICreateInstance(self, reference: Any) -> int:
        functions = reference._obj
        assert functions.version == 0x7102000C
        for place, function in self._kept:
            functions.functions[place] = ctypes.cast(function, ctypes.c_void_p)
        return 0

    def cuCtxGetCurrent(self, reference: Any) -> int:
        reference._obj.value = 0x77
        return 0

    def open(self, params: int, session: int) -> int:
        found = OpenParams.from_address(params)
        assert (found.version, found.device_type, found.device, found.api_version) == (0x7101000C, 1, 0x77, 0x0100000C)
        self.calls.append("open")
        ctypes.c_void_p.from_address(session).value = 0x55
        return self._opening

    def get(self, session: int, codec: Guid, params: int, value: int) -> int:
        asked = CapsParam.from_address(params)
        assert (session, asked.version, codec.data1, codec.data4[7]) == (0x55, 0x7101000C, 0x790CDC88, 0x03)
        ctypes.c_int.from_address(value).value = self._caps.get(asked.cap, 0)
        return 0 if asked.cap in self._caps else 8

    def destroy(self, session: int) -> int:
        assert session == 0x55
        self.calls.append("destroy")
        return 0


ALL_CAPS = {16: 8192, 17: 4096, 31: 262144, 33: 1, 34: 1, 45: 145, 46: 49, 49: 3}


@pytest.mark.parametrize(
    ("caps", "opening", "found"),
    [
        (ALL_CAPS, 0, {"hevc", "hevc420"}),
        (ALL_CAPS | {33: 0}, 0, {"hevc420"}),
        (ALL_CAPS | {34: 0}, 0, set()),
        ({}, 0, set()),
        (ALL_CAPS, 1, set()),
        (ALL_CAPS, 2, set()),
    ],
)
def test_what_the_driver_says(
    caps: dict[int, int], opening: int, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(caps, opening)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    answer = encode_caps()
    assert set(answer) == found
    assert all(each == EncodeCaps(145, 49, 8192, 4096, 262144, 3) for each in answer.values())
    assert driver.calls == ["open", "destroy"]


def test_a_stub_of_the_drivers_library_has_no_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(ALL_CAPS)
    monkeypatch.setattr(driver, "NvEncodeAPICreateInstance", lambda reference: 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert encode_caps() == {}


def test_a_driver_that_gives_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(ALL_CAPS, opening=10)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    with pytest.raises(OSError, match=r"libnvidia-encode.so.1 could not open an encode session \(NVENC error 10\)"):
        encode_caps()
    assert driver.calls == ["open", "destroy"]
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda reference: 3)
    with pytest.raises(OSError, match="no CUDA context is current"):
        encode_caps()


def test_the_structures_have_their_c_sizes() -> None:
    assert [ctypes.sizeof(each) for each in (Functions, OpenParams, CapsParam, Guid)] == [2552, 1552, 256, 16]
    assert (OpenParams.device.offset, OpenParams.api_version.offset, OpenParams.reserved2.offset) == (8, 24, 1040)


@BOTH
@pytest.mark.gpu
def test_on_a_gpu(codec: HevcCodec) -> None:
    encoders, about = open_nvenc((codec.name,), 2)
    if codec.name not in encoders:
        pytest.skip(about)
    for frames in (pictures(1), pictures(7), pictures(2, 240, 432)):
        num_frames, _, height, width = frames.shape
        bitstream = encoders[codec.name].encode(frames)
        assert torch.equal(codec.decode(bitstream, (num_frames, height, width)), frames)
