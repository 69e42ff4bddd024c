"""PyNvVideoCodec's decoder as it behaves, on the CPU: pictures by libavcodec, into surfaces that are written again from
the next ``Decode`` on, on the decoder's stream. Signatures are those of version 2.2.4."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from threading import Event, Lock
from typing import Any
from weakref import WeakSet

import av
import av.error
import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.nvdec import CHROMA, NUM_SURFACES, DecodeCaps, Nvdec
from tests.plugin.device.fake_streams import FakeDevice, FakeStream


class PacketData:
    __slots__ = ("bsl", "bsl_data", "decode_flag", "pts")

    def __init__(self) -> None:
        self.bsl = self.bsl_data = self.decode_flag = self.pts = 0


class VideoPacketFlag(IntEnum):
    ENDOFSTREAM = 1
    ENDOFPICTURE = 8


class DisplayDecodeLatencyType(IntEnum):
    NATIVE = 0
    LOW = 1
    ZERO = 2


class CudaVideoCodec(IntEnum):
    HEVC = 8


class Surface:
    """As much of ``DecodedFrame`` as we use. It has no ``__dlpack_device__``, which only torch's slow way needs."""

    def __init__(self, memory: torch.Tensor, cudastream: int) -> None:
        self._memory = memory
        self._cudastream = cudastream
        self.shape = list(memory.shape)

    def __dlpack__(self, stream: Any = 0) -> Any:
        assert stream == self._cudastream, "another stream would wait for the decoder's"
        return self._memory.__dlpack__()


@dataclass(eq=False)
class Decoder:
    """``largest``: width and height."""

    _nvc: FakeNvc
    _cudastream: int
    _stream: FakeStream
    largest: tuple[int, int]
    _latency: DisplayDecodeLatencyType
    _size: tuple[int, int] | None = None
    _surfaces: list[torch.Tensor] = field(default_factory=list)
    _context: av.VideoCodecContext | None = None
    _held: list[torch.Tensor] = field(default_factory=list)

    def Decode(self, packet: PacketData) -> list[Surface]:
        is_end = bool(packet.decode_flag & VideoPacketFlag.ENDOFSTREAM) or not packet.bsl
        self._nvc.at_gate.set()
        assert self._nvc.gate.wait(20)
        data = b"" if is_end else ctypes.string_at(packet.bsl_data, packet.bsl)
        self._nvc.packets.append(data)
        if self._nvc.fails == "decode" and not is_end:
            raise RuntimeError("cuvidDecodePicture returned error 999")
        pictures = [*self._held, *self._decoded(data, is_end)]
        held = 0 if is_end or self._latency == DisplayDecodeLatencyType.LOW else self._nvc.latency_pictures
        self._held, pictures = pictures[len(pictures) - held :] if held else [], pictures[: len(pictures) - held]
        if self._nvc.fails == "extra" and is_end:
            pictures = [*pictures, torch.zeros(self._nvc.last_shape, dtype=torch.uint8)]
        if self._nvc.fails == "missing" and is_end:
            pictures = pictures[:-1] if pictures else []
        return [self._surface(index, picture) for index, picture in enumerate(pictures)]

    def _decoded(self, data: bytes, is_end: bool) -> list[torch.Tensor]:
        if self._context is None:
            context = av.CodecContext.create("hevc", "r")
            assert isinstance(context, av.VideoCodecContext)
            self._context = context
        try:
            found = self._context.decode(None if is_end else av.Packet(data))
        except av.error.FFmpegError:
            found = []  # the real one raises nothing either
        if is_end:
            self._context = None
        return [self._as_configured(picture) for picture in found]

    def _as_configured(self, picture: av.VideoFrame) -> torch.Tensor:
        """A picture of another size than the decoder's first ones is scaled to that, silently."""
        size = picture.width, picture.height
        assert size[0] <= self.largest[0], "Reconfigure Not supported when width/height > maxwidth/maxheight"
        self._size = self._size or size
        if size != self._size:
            width, height = self._size
            picture = picture.reformat(width, height)
        rows = picture.to_ndarray()  # 4:4:4: (3, H, W); 4:2:0: luma, then both chromas
        self._nvc.last_shape = (rows.size // picture.width, picture.width)
        if self._nvc.fails in ("pixels", "one pixel"):
            rows = np.ones_like(rows) if self._nvc.fails == "pixels" else rows.copy()
            rows.flat[0] ^= 1 << 6
        return torch.from_numpy(np.ascontiguousarray(rows).reshape(-1, picture.width))

    def _surface(self, index: int, picture: torch.Tensor) -> Surface:
        while len(self._surfaces) <= index:
            self._surfaces.append(torch.full(picture.shape, 0xDD, dtype=torch.uint8))
        memory = self._surfaces[index]
        self._nvc.device.launch(self._stream, partial(memory.copy_, picture))
        return Surface(memory, self._cudastream)


class FakeNvc:
    """The module. ``fails`` names what goes wrong from then on. ``most_bytes``: the most that 4:4:4 decoders' surfaces
    took at once. Decoders wait until ``gate`` is set."""

    PacketData = PacketData
    VideoPacketFlag = VideoPacketFlag
    DisplayDecodeLatencyType = DisplayDecodeLatencyType
    cudaVideoCodec = CudaVideoCodec

    def __init__(self, device: FakeDevice, *, latency_pictures: int = 1) -> None:
        self.device = device
        self.latency_pictures = latency_pictures
        self.latency = DisplayDecodeLatencyType.NATIVE  # the one that decoders have to ask for
        self.fails = ""
        self.calls: list[tuple[Any, ...]] = []
        self.packets: list[bytes] = []
        self.last_shape: tuple[int, int] = (1, 1)
        self.most_bytes = 0
        self.gate, self.at_gate = Event(), Event()
        self.gate.set()
        self._live: WeakSet[Decoder] = WeakSet()
        self._lock = Lock()

    @property
    def live_bytes(self) -> int:
        return sum(NUM_SURFACES * 3 * width * height for width, height in (each.largest for each in self._live))

    def CreateDecoder(
        self,
        gpuid: int = 0,
        codec: Any = None,
        cudacontext: int = 0,
        cudastream: int = 0,
        usedevicememory: bool = False,
        maxwidth: int = 0,
        maxheight: int = 0,
        latency: Any = DisplayDecodeLatencyType.NATIVE,
    ) -> Decoder:
        self.calls.append(("CreateDecoder", maxwidth, maxheight))
        assert (gpuid, codec, usedevicememory) == (0, CudaVideoCodec.HEVC, True)
        assert latency == self.latency, "with LOW, the engine would wait for the host after each picture"
        assert cudastream != 0, "the default stream"
        if self.fails == "create":
            raise RuntimeError("CreateDecoder: out of memory")
        stream = self.device.streams[cudastream - 1]
        decoder = Decoder(self, cudastream, stream, (maxwidth, maxheight), latency)
        with self._lock:
            self._live.add(decoder)
            self.most_bytes = max(self.most_bytes, self.live_bytes)
        return decoder


def make_caps(*, num_engines: int = 2, max_side: int = 4096) -> DecodeCaps:
    return DecodeCaps(
        is_supported=1,
        num_engines=num_engines,
        min_width=144,
        min_height=144,
        max_width=max_side,
        max_height=max_side,
        max_macroblocks=65536,
    )


def make_nvdec(nvc: FakeNvc, *, num_engines: int = 2) -> Nvdec:
    """Return engines that decode both HEVC codecs."""
    return Nvdec(nvc, nvc.device, {name: make_caps(num_engines=num_engines) for name in CHROMA})
