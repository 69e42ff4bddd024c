"""Decode the HEVC bitstreams of `codecs.hevc` on the GPU's video engines, through PyNvVideoCodec 2.2. The frames go
into device memory, and from there to the host if needed.

A bitstream's table gives NVDEC what it takes: one access unit a packet, without a demuxer. A decoder writes its
surfaces on its stream, and reuses them from its next ``Decode`` on. The copy out of a surface is launched on the same
stream before that, so no thread has to wait for it.

Decoded frames stay on the device. They are verified by their frame sum: a kernel computes it on the same stream, and
only eight bytes are copied to the host. Chunks without a frame sum are also copied to the host, and verified by the
checksum of their integers.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from sgl_kvfetch.codec.bitstream.base import DecodedFrames, Decoders, FrameDecoder, PictureShape
from sgl_kvfetch.codec.bitstream.hevc import HevcCodec
from sgl_kvfetch.codec.bitstream.nvdec_caps import DecodeCaps, decode_caps
from sgl_kvfetch.codec.bitstream.nvidia import CODECS, brief, moving_gradients, takes
from sgl_kvfetch.codec.bitstream.surfaces import SurfaceBudget, surface_bytes
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.codec.layout.frame_sum import WORD_BYTES, sum_of_frames
from sgl_kvfetch.codec.layout.frames import MIN_PICTURE
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.triton_kernels.frame_sum import frame_sum

_limited = LimitedLogger(logging.getLogger(__name__))

ENV = "KVFETCH_NVDEC"  # 0 disables NVDEC


class _NoDecoderError(Exception):
    """The GPU gave us no decoder. The bitstream may be fine."""


class PictureSize(NamedTuple):
    """The pictures that a decoder is made for. ``planes``: layers in a picture, which determines the chroma format."""

    planes: int
    width: int
    height: int


@dataclass(eq=False)
class _Decoder:
    handle: Any  # PyNvVideoCodec's; its surfaces are written on `stream`
    stream: Stream
    num_bytes: int


class NvdecDecoders:
    """The decoders of a process, each for pictures of one size. Thread-safe.

    No decoder is reconfigured, and none is destroyed while SGLang serves: PyNvVideoCodec holds the interpreter lock in
    both, while the driver waits for the device. Sessions share the decoders instead. There are as many of a size as
    were ever used at the same time.
    """

    def __init__(self, nvc: Any, device: Device) -> None:
        """``nvc``: the module PyNvVideoCodec."""
        self._nvc = nvc
        self._device = device
        self.surfaces = SurfaceBudget()
        self._lock = Lock()  # guards the fields below
        self._idle: defaultdict[PictureSize, list[_Decoder]] = defaultdict(list)
        self._broken: list[_Decoder] = []  # have raised, and may be in any state

    @contextmanager
    def borrow(self, size: PictureSize) -> Iterator[_Decoder]:
        """Lend a decoder. It is not lent again after an exception, except for a lack of memory. Raises
        `_NoDecoderError`."""
        with self._lock:
            decoder = self._idle[size].pop() if self._idle[size] else None
        decoder = decoder or self._create(size)
        is_sound = False
        try:
            yield decoder
            is_sound = True
        except BaseException as e:
            is_sound = isinstance(e, torch.OutOfMemoryError)
            self._device.mark(decoder.stream).synchronize()  # wait for copies to memory that will be used again
            raise
        finally:
            with self._lock:
                (self._idle[size] if is_sound else self._broken).append(decoder)

    def drop(self) -> None:
        """Destroy all decoders that no session uses. Call this only while nothing is served."""
        with self._lock:
            dropped = [*self._broken, *chain.from_iterable(self._idle.values())]
            self._idle.clear()
            self._broken.clear()
        for decoder in dropped:
            decoder.handle = None
            self.surfaces.give_back(decoder.num_bytes)

    def _create(self, size: PictureSize) -> _Decoder:
        nvc, num_bytes = self._nvc, surface_bytes(*size)
        if not self.surfaces.take(num_bytes):
            raise _NoDecoderError(f"other decoders leave no room for one of {size.width}x{size.height}")
        stream = self._device.new_stream()
        try:
            handle = nvc.CreateDecoder(
                gpuid=self._device.torch_device.index or 0,
                codec=nvc.cudaVideoCodec.HEVC,
                cudacontext=0,  # the primary context, which torch uses
                cudastream=stream.cuda_stream,
                usedevicememory=True,
                maxwidth=size.width,
                maxheight=size.height,
                # A picture is returned while the engine decodes the next one. With LOW, the engine would be idle until
                # the host has taken the picture.
                latency=nvc.DisplayDecodeLatencyType.NATIVE,
            )
        except Exception as e:
            self.surfaces.give_back(num_bytes)
            raise _NoDecoderError(f"NVDEC gave no decoder for {size.width}x{size.height}: {brief(e)}") from e
        return _Decoder(handle, stream, num_bytes)


class NvdecSession:
    """Decodes bitstreams, one thread at a time, on decoders that it shares with other sessions.

    The session keeps its pinned host memory. Device memory comes from torch's caching allocator, which stops asking the
    driver once it has had frames of these sizes. Restores read the frames on another stream; `Device.used_on` prevents
    reuse of the memory until they finish. If the session owned this memory, it would have to wait for the restores
    before its next bitstream, and they in turn wait for forward passes.
    """

    def __init__(self, nvc: Any, device: Device, decoders: NvdecDecoders) -> None:
        """``nvc``: the module PyNvVideoCodec."""
        self._nvc = nvc
        self._device = device
        self._decoders = decoders
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned; as large as the largest use so far

    def decode(
        self,
        codec: HevcCodec,
        access_units: Sequence[memoryview],
        shape: PictureShape,
        *,
        with_sum: bool = False,
        to_host: bool = False,
    ) -> DecodedFrames:
        """Decode a bitstream, and wait for the device. ``with_sum``, ``to_host``: as in `FrameDecoder.decode`. Raises
        CorruptError for the bitstream, `_NoDecoderError` or torch's out-of-memory error otherwise."""
        assert not (with_sum and to_host)
        num_frames, height, width = shape
        all_planes = num_frames, 3, height, width
        with self._decoders.borrow(PictureSize(codec.planes_a_picture, width, height)) as decoder:
            stream = decoder.stream
            frames = self._pinned(all_planes) if to_host else self._device.empty(all_planes, stream)
            self._decode(decoder, codec, access_units, frames)
            if with_sum:
                return DecodedFrames(frames, None, is_on_device=True, frame_sum=self._frame_sum(frames, stream))
            if to_host:
                self._device.mark(stream).synchronize()
                return DecodedFrames(frames, frames, is_on_device=False)
            return DecodedFrames(frames, self._on_host(frames, stream), is_on_device=True)

    def _decode(
        self, decoder: _Decoder, codec: HevcCodec, access_units: Sequence[memoryview], frames: torch.Tensor
    ) -> None:
        expected, num_decoded = len(access_units), 0
        with self._device.launching(decoder.stream) as launch:
            for access_unit in (*access_units, None):
                for surface in self._surfaces(decoder, codec, access_unit):
                    if num_decoded == expected:
                        raise CorruptError(f"{codec.name} bitstream decodes to more than {expected} pictures")
                    launch(self._copy(decoder, codec, surface, frames, num_decoded))
                    num_decoded += 1
        if num_decoded != expected:
            raise CorruptError(f"{codec.name} bitstream decodes to {num_decoded} pictures, expected {expected}")

    def _surfaces(self, decoder: _Decoder, codec: HevcCodec, access_unit: memoryview | None) -> Sequence[Any]:
        """Decode one access unit; None ends the bitstream. Copy the returned surfaces before the next call."""
        packet = self._nvc.PacketData()
        data = np.frombuffer(access_unit or b"\0", np.uint8)  # keeps the memory alive during the call
        if access_unit is None:
            packet.decode_flag = self._nvc.VideoPacketFlag.ENDOFSTREAM
        elif not access_unit:  # NVDEC would take it for the end
            raise CorruptError(f"{codec.name} bitstream has an empty picture")
        else:
            packet.bsl_data, packet.bsl = data.ctypes.data, data.size
            packet.decode_flag = self._nvc.VideoPacketFlag.ENDOFPICTURE
        try:
            surfaces: Sequence[Any] = decoder.handle.Decode(packet)
        except Exception as e:
            raise CorruptError(f"{codec.name} bitstream does not decode on NVDEC: {brief(e)}") from e
        return surfaces

    def _copy(
        self, decoder: _Decoder, codec: HevcCodec, surface: Any, frames: torch.Tensor, index: int
    ) -> Callable[[], object]:
        """Return the copy of picture ``index`` to its place in ``frames``. A 4:4:4 picture has three planes, stacked
        vertically. Of a 4:2:0 picture only the luma, which comes first, is copied: it is one plane of ours."""
        num_frames, _, height, width = frames.shape
        if codec.planes_a_picture == 3:
            place, expected = frames[index].flatten(0, 1), (3 * height, width)
        else:
            plane, frame = divmod(index, num_frames)
            place, expected = frames[frame, plane], (height * 3 // 2, width)
        found = tuple(surface.shape)
        if found != expected:
            raise CorruptError(f"{codec.name} picture has rows and columns {found}, expected {expected}")
        # torch would ask the surface for its device first, and then select a stream: fifteen times as slow.
        rows = from_dlpack(surface.__dlpack__(stream=decoder.stream.cuda_stream))[: len(place)]
        return lambda: place.copy_(rows, non_blocking=True)

    def _on_host(self, frames: torch.Tensor, stream: Stream) -> torch.Tensor:
        host = self._pinned(frames.shape)
        self._device.launch(stream, lambda: host.copy_(frames, non_blocking=True))
        self._device.mark(stream).synchronize()
        return host

    def _frame_sum(self, frames: torch.Tensor, stream: Stream) -> int:
        host = self._pinned([WORD_BYTES]).view(torch.int64)
        self._device.launch(stream, lambda: host.copy_(frame_sum(frames), non_blocking=True))
        self._device.mark(stream).synchronize()
        return int(host) % (1 << 64)

    def _pinned(self, shape: Sequence[int]) -> torch.Tensor:
        """Return pinned memory. No copy to it is pending: every user waits for the device."""
        num_bytes = math.prod(shape)
        if self._host.numel() < num_bytes:
            self._host = self._device.pinned(num_bytes)
        return self._host[:num_bytes].view(*shape)


class NvdecDecoder(FrameDecoder):
    """Decodes one HEVC codec on a session. Falls back to the CPU for pictures whose size NVDEC does not support, and
    while NVDEC gives no decoder."""

    def __init__(self, codec: HevcCodec, caps: DecodeCaps, session: NvdecSession) -> None:
        self._codec = codec
        self._caps = caps
        self._session = session

    def decode(
        self, bitstream: bytes | memoryview, shape: PictureShape, *, with_sum: bool = False, to_host: bool = False
    ) -> DecodedFrames:
        num_frames, height, width = shape
        access_units = self._codec.access_units(bitstream, num_frames)
        if takes(self._caps, width, height):
            try:
                return self._session.decode(self._codec, access_units, shape, with_sum=with_sum, to_host=to_host)
            except (_NoDecoderError, torch.OutOfMemoryError) as e:
                _limited.warning("nvdec", f"{self._codec.name} is decoded on the CPU: {e}")
        frames = self._codec.decode(bitstream, shape)
        return DecodedFrames(frames, frames, is_on_device=False)


class Nvdec:
    """The video engines of one GPU. Thread-safe."""

    def __init__(self, nvc: Any, device: Device, caps: Mapping[str, DecodeCaps]) -> None:
        """``nvc``: the module PyNvVideoCodec. ``caps``: the codecs to decode, by name."""
        self._nvc = nvc
        self._device = device
        self._caps = caps
        self.codecs = tuple(caps)
        self.torch_device = device.torch_device
        self._decoders = NvdecDecoders(nvc, device)
        self.surfaces = self._decoders.surfaces
        self.drop_decoders = self._decoders.drop

    @property
    def num_engines(self) -> int:
        """With fewer sessions than this some engines are idle: a session uses one engine."""
        num_engines: int = max(caps.num_engines for caps in self._caps.values())
        return max(1, num_engines)

    def open_session(self) -> Decoders:
        """Open a session for one thread at a time. It takes no device memory until its first bitstream."""
        session = NvdecSession(self._nvc, self._device, self._decoders)
        return {name: NvdecDecoder(CODECS[name], caps, session) for name, caps in self._caps.items()}


def open_nvdec(device: Device) -> tuple[Nvdec | None, str]:
    """Open the video engines, for the codecs that pass a bit-exact trial. Return them, or None if there are no such
    codecs, and a sentence about the result. The device's context must be current. Raises nothing."""
    if os.environ.get(ENV) == "0":
        return None, f"HEVC is decoded on the CPU: {ENV}=0 is set"
    try:
        nvc = importlib.import_module("PyNvVideoCodec")
        caps = decode_caps()
    except Exception as e:  # loading the driver's libraries fails in many ways
        return None, f"HEVC is decoded on the CPU: {brief(e)}"
    if not caps:
        return None, "HEVC is decoded on the CPU: this GPU's video engines do not decode it"
    found = Nvdec(nvc, device, caps)
    decoders = found.open_session()
    usable: dict[str, DecodeCaps] = {}
    on_cpu = []
    for name, codec in CODECS.items():
        reason = _trial(codec, decoders[name]) if name in caps else "its chroma format is not supported"
        if reason:
            on_cpu.append(f"; {name} on the CPU: {reason}")
        else:
            usable[name] = caps[name]
    about = f"decoded on NVDEC, {found.num_engines} engines: {', '.join(usable) or 'nothing'}{''.join(on_cpu)}"
    return (Nvdec(nvc, device, usable) if usable else None), about


def _trial(codec: HevcCodec, decoder: FrameDecoder) -> str:
    """Decode six small pictures, each predicted from the one before: more than a decoder holds back. Return what is
    wrong with them or their frame sum; an empty string if nothing is. This also compiles the frame sum's kernel."""
    frames = moving_gradients(6, MIN_PICTURE, MIN_PICTURE)
    shape = frames.shape[0], *frames.shape[2:]
    try:
        bitstream = codec.encode(frames)
        found = decoder.decode(bitstream, shape)
        is_equal = found.host is not None and torch.equal(found.host, frames)  # before the next decode overwrites it
        summed = decoder.decode(bitstream, shape, with_sum=True)
    except Exception as e:
        return f"a trial failed: {brief(e)}"
    if not (found.is_on_device and summed.is_on_device):
        return "a trial was not decoded on NVDEC"
    if not is_equal:
        return "a trial gave other pixels"
    return "" if summed.frame_sum == sum_of_frames(frames) else "a trial gave another frame sum"
