"""PyNvVideoCodec's decoder as it behaves, on the CPU: pictures by libavcodec, into surfaces that are written again from
the next ``Decode`` on, on the decoder's stream. Arguments are those of version 2.2.4."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import av
import av.error
import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.nvdec import CHROMA, NUM_SURFACES, DecodeCaps, Nvdec
from tests.plugin.device.fake_streams import FakeDevice, FakeStream


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
    _surfaces: list[torch.Tensor] = field(default_factory=list)
    _context: av.VideoCodecContext | None = None
    _held: list[torch.Tensor] = field(default_factory=list)

    def Decode(self, packet: SimpleNamespace) -> list[Surface]:
        is_end = packet.decode_flag == "end of stream" or not packet.bsl
        data = b"" if is_end else ctypes.string_at(packet.bsl_data, packet.bsl)
        self._nvc.packets.append(data)
        if self._nvc.fails == "decode" and not is_end:
            raise RuntimeError("cuvidDecodePicture returned error 999")
        pictures = [*self._held, *self._decoded(data, is_end)]
        held = 0 if is_end else self._nvc.latency_pictures
        self._held, pictures = pictures[len(pictures) - held :] if held else [], pictures[: len(pictures) - held]
        if is_end and self._nvc.fails == "extra":
            pictures += pictures[-1:]
        if is_end and self._nvc.fails == "missing":
            pictures = pictures[:-1]
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
        return [self._rows(picture) for picture in found]

    def _rows(self, picture: av.VideoFrame) -> torch.Tensor:
        assert picture.width <= self.largest[0], "Reconfigure Not supported when width/height > maxwidth/maxheight"
        rows = np.array(picture.to_ndarray()).reshape(-1, picture.width)  # all planes; of 4:2:0, luma, then chroma
        if self._nvc.fails == "pixels":
            rows[0, 0] ^= 1 << 6
        return torch.from_numpy(rows)

    def _surface(self, index: int, picture: torch.Tensor) -> Surface:
        while len(self._surfaces) <= index:
            self._surfaces.append(torch.full(picture.shape, 0xDD, dtype=torch.uint8))
        memory = self._surfaces[index]
        self._nvc.device.launch(self._stream, partial(memory.copy_, picture))
        return Surface(memory, self._cudastream)


class FakeNvc:
    """The module. ``fails`` names what goes wrong from then on. ``most_bytes``: the most that 4:4:4 decoders' surfaces
    took at once. ``sizes``: of all decoders that were made."""

    PacketData = staticmethod(partial(SimpleNamespace, bsl=0, bsl_data=0, decode_flag=""))
    VideoPacketFlag = SimpleNamespace(ENDOFSTREAM="end of stream", ENDOFPICTURE="end of picture")
    DisplayDecodeLatencyType = SimpleNamespace(NATIVE=0, LOW=1)
    cudaVideoCodec = SimpleNamespace(HEVC=8)

    def __init__(self, device: FakeDevice, *, latency_pictures: int = 1) -> None:
        self.device = device
        self.latency_pictures = latency_pictures
        self.fails = ""
        self.sizes: list[tuple[int, int]] = []
        self.packets: list[bytes] = []
        self.most_bytes = 0
        self._live: WeakSet[Decoder] = WeakSet()
        self._lock = Lock()

    @property
    def live_bytes(self) -> int:
        return sum(NUM_SURFACES * 3 * width * height for width, height in (each.largest for each in self._live))

    def CreateDecoder(
        self,
        *,
        gpuid: int,
        codec: Any,
        cudacontext: int,
        cudastream: int,
        usedevicememory: bool,
        maxwidth: int,
        maxheight: int,
        latency: int,
    ) -> Decoder:
        self.sizes.append((maxwidth, maxheight))
        assert (gpuid, codec, cudacontext, usedevicememory) == (0, 8, 0, True)
        assert latency == 0, "with LOW, the engine would wait for the host after each picture"
        assert cudastream != 0, "the default stream"
        if self.fails == "create":
            raise RuntimeError("CreateDecoder: out of memory")
        decoder = Decoder(self, cudastream, self.device.streams[cudastream - 1], (maxwidth, maxheight))
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
