"""HEVC on the GPU's video engines, through PyNvVideoCodec 2.2: the bitstreams of `codecs.hevc`, decoded into device
memory, or by way of it to the host.

What a bitstream's table gives is what NVDEC takes: one access unit a packet, no demuxer. A session is a decoder with a
stream of its own. A decoder writes its surfaces on that stream, and writes them again from its next ``Decode`` on; the
copy out of a surface is launched on the same stream before that, so that nobody waits for it.

Decoded frames stay there: what says that they are right is their frame sum, which a kernel computes on the same stream,
and of which the host gets eight bytes. Segments of format 1.0 have none: their frames are copied to the host as well,
to be verified by the checksum of the integers.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from sgl_kvfetch.codecs.base import DecodedFrames, Decoders, FrameDecoder
from sgl_kvfetch.codecs.hevc import HevcCodec
from sgl_kvfetch.codecs.nvdec_caps import DecodeCaps, decode_caps
from sgl_kvfetch.codecs.nvidia import CODECS, brief, moving_gradients, takes
from sgl_kvfetch.codecs.surfaces import SurfaceBudget, surface_bytes
from sgl_kvfetch.cuda_streams import Device
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.layout.frame_sum import WORD_BYTES, sum_of_frames
from sgl_kvfetch.layout.frames import MIN_PICTURE
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.triton_kernels.frame_sum import frame_sum

_limited = LimitedLogger(logging.getLogger(__name__))

ENV = "KVFETCH_NVDEC"  # 0: is not to be used


class _NoDecoderError(Exception):
    """The GPU gave us no decoder, which says nothing about the bitstream."""


class NvdecSession:
    """A decoder, made when it is needed and kept from bitstream to bitstream. For one thread at a time.

    Memory on the host is the session's own, and kept too. That on the device comes from torch's allocator, which asks
    the driver for nothing once it has had frames of these sizes: the restores that read them are on another stream,
    and `Device.used_on` keeps the memory from being written again until they are over. With memory of its own a session
    would have to wait for them before its next bitstream, and they wait for forward passes in turn.

    While it does not decode, its decoder may be given up, on any thread, for another session's.
    """

    def __init__(self, nvc: Any, device: Device, budget: SurfaceBudget) -> None:
        """``nvc``: the module PyNvVideoCodec."""
        self.lock = Lock()  # as in `SurfaceOwner`
        self._nvc = nvc
        self._device = device
        self._budget = budget
        self._stream = device.new_stream()
        self._decoder: Any = None
        self._planes = 0  # that a picture of ours has, which is its chroma format
        self._size = self._largest = (0, 0)  # width and height: of pictures now, and at most
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned; as large as the largest frames so far

    def decode(
        self,
        codec: HevcCodec,
        access_units: Sequence[memoryview],
        num_frames: int,
        height: int,
        width: int,
        *,
        with_sum: bool = False,
        to_host: bool = False,
    ) -> DecodedFrames:
        """Waits for the device. ``with_sum``, ``to_host``: as in `FrameDecoder.decode`. Raises CorruptError;
        `_NoDecoderError` and torch's for want of memory if it is not the bitstream's fault. A decoder that something
        went wrong with is not used again."""
        assert not (with_sum and to_host)
        shape = num_frames, 3, height, width
        with self.lock:
            try:
                frames = self._pinned(shape) if to_host else self._device.empty(shape, self._stream)
                self._configure(codec.planes_a_picture, width, height)
                self._decode(codec, access_units, frames)
                if with_sum:
                    return DecodedFrames(frames, None, is_on_device=True, frame_sum=self._frame_sum(frames))
                if to_host:
                    self._device.mark(self._stream).synchronize()
                    return DecodedFrames(frames, frames, is_on_device=False)
                return DecodedFrames(frames, self._on_host(frames), is_on_device=True)
            except BaseException:
                self._drop()
                raise
            finally:
                self._budget.used(self)

    def give_up(self) -> None:
        """The next decoder is made for no larger pictures than it gets: there is little room."""
        self._largest = 0, 0
        self._drop()

    def _configure(self, planes: int, width: int, height: int) -> None:
        fits = width <= self._largest[0] and height <= self._largest[1]
        if self._decoder is None or self._planes != planes or not fits:
            self._drop()  # before the next one takes its memory
            self._create(planes, max(width, self._largest[0]), max(height, self._largest[1]))
        elif self._size != (width, height):
            try:
                self._decoder.setReconfigParams(width, height)  # else pictures would be scaled, and nobody told
            except Exception as e:
                raise _NoDecoderError(f"NVDEC was not reconfigured to {width}x{height}: {brief(e)}") from e
        self._planes, self._size = planes, (width, height)

    def _create(self, planes: int, max_width: int, max_height: int) -> None:
        nvc = self._nvc
        if not self._budget.take(self, surface_bytes(planes, max_width, max_height)):
            self._largest = 0, 0  # so that the next one asks for no more than it needs
            raise _NoDecoderError(f"busy decoders leave no room for one of {max_width}x{max_height}")
        try:
            self._decoder = nvc.CreateDecoder(
                gpuid=self._device.torch_device.index or 0,
                codec=nvc.cudaVideoCodec.HEVC,
                cudacontext=0,  # the primary one, which is torch's
                cudastream=self._stream.cuda_stream,
                usedevicememory=True,
                maxwidth=max_width,
                maxheight=max_height,
                latency=nvc.DisplayDecodeLatencyType.LOW,  # no picture is shown later than it is decoded
            )
        except Exception as e:
            raise _NoDecoderError(f"NVDEC gave no decoder for {max_width}x{max_height}: {brief(e)}") from e
        self._largest = max_width, max_height

    def _decode(self, codec: HevcCodec, access_units: Sequence[memoryview], frames: torch.Tensor) -> None:
        expected, num_decoded = len(access_units), 0
        for access_unit in (*access_units, None):
            for surface in self._surfaces(codec, access_unit):
                if num_decoded == expected:
                    raise CorruptError(f"{codec.name} bitstream decodes to more than {expected} pictures")
                self._take(codec, surface, frames, num_decoded)
                num_decoded += 1
        if num_decoded != expected:
            raise CorruptError(f"{codec.name} bitstream decodes to {num_decoded} pictures, expected {expected}")

    def _surfaces(self, codec: HevcCodec, access_unit: memoryview | None) -> Sequence[Any]:
        """What is decoded by now; to be taken before the next call. None ends the bitstream."""
        packet = self._nvc.PacketData()
        data = np.frombuffer(access_unit or b"\0", np.uint8)  # holds the memory during the call
        if access_unit is None:
            packet.decode_flag = self._nvc.VideoPacketFlag.ENDOFSTREAM
        elif not access_unit:  # would be taken for the end
            raise CorruptError(f"{codec.name} bitstream has an empty picture")
        else:
            packet.bsl_data, packet.bsl = data.ctypes.data, data.size
            packet.decode_flag = self._nvc.VideoPacketFlag.ENDOFPICTURE
        try:
            surfaces: Sequence[Any] = self._decoder.Decode(packet)
        except Exception as e:
            raise CorruptError(f"{codec.name} bitstream does not decode on NVDEC: {brief(e)}") from e
        return surfaces

    def _take(self, codec: HevcCodec, surface: Any, frames: torch.Tensor, index: int) -> None:
        """Launch the copy of picture ``index`` to its place. 4:4:4 has three planes of one size, one below the other;
        of 4:2:0, whose chroma follows its luma, the luma is one plane of ours."""
        num_frames, _, height, width = frames.shape
        if codec.planes_a_picture == 3:
            place, expected = frames[index].flatten(0, 1), (3 * height, width)
        else:
            plane, frame = divmod(index, num_frames)
            place, expected = frames[frame, plane], (height * 3 // 2, width)
        found = tuple(surface.shape)
        if found != expected:
            raise CorruptError(f"{codec.name} picture has rows and columns {found}, expected {expected}")
        self._device.launch(self._stream, partial(_copy_rows, surface, place))

    def _on_host(self, frames: torch.Tensor) -> torch.Tensor:
        host = self._pinned(frames.shape)
        self._device.launch(self._stream, partial(_download, frames, host))
        self._device.mark(self._stream).synchronize()
        return host

    def _frame_sum(self, frames: torch.Tensor) -> int:
        host = self._pinned([WORD_BYTES]).view(torch.int64)
        self._device.launch(self._stream, partial(_download_sum, frames, host))
        self._device.mark(self._stream).synchronize()
        return int(host) % (1 << 64)

    def _pinned(self, shape: Sequence[int]) -> torch.Tensor:
        """Nothing is on its way to it: whatever uses it waits for the device in the end."""
        num_bytes = math.prod(shape)
        if self._host.numel() < num_bytes:
            self._host = self._device.pinned(num_bytes)
        return self._host[:num_bytes].view(*shape)

    def _drop(self) -> None:
        try:
            if self._decoder is not None:
                self._device.mark(self._stream).synchronize()  # copies out of its surfaces
        finally:
            self._decoder = None
            self._budget.give_back(self)


class NvdecDecoder(FrameDecoder):
    """One of our HEVC codecs, on a session. Pictures that NVDEC does not take, and whatever comes while it gives no
    decoder, is decoded on the CPU."""

    def __init__(self, codec: HevcCodec, caps: DecodeCaps, session: NvdecSession) -> None:
        self._codec = codec
        self._caps = caps
        self._session = session

    def decode(
        self,
        bitstream: bytes | memoryview,
        num_frames: int,
        height: int,
        width: int,
        *,
        with_sum: bool = False,
        to_host: bool = False,
    ) -> DecodedFrames:
        access_units = self._codec.access_units(bitstream, num_frames)
        if takes(self._caps, width, height):
            try:
                return self._session.decode(
                    self._codec, access_units, num_frames, height, width, with_sum=with_sum, to_host=to_host
                )
            except (_NoDecoderError, torch.OutOfMemoryError) as e:
                _limited.warning("nvdec", f"{self._codec.name} is decoded on the CPU: {e}")
        frames = self._codec.decode(bitstream, num_frames, height, width)
        return DecodedFrames(frames, frames, is_on_device=False)


class Nvdec:
    """The video engines of one GPU. From any thread."""

    def __init__(self, nvc: Any, device: Device, caps: Mapping[str, DecodeCaps]) -> None:
        """``nvc``: the module PyNvVideoCodec. ``caps``: of the codecs to decode, by name."""
        self._nvc = nvc
        self._device = device
        self._caps = caps
        self.surfaces = SurfaceBudget()  # of all sessions

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(self._caps)

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    @property
    def num_engines(self) -> int:
        """Fewer sessions leave some idle: one never uses more than one."""
        num_engines: int = max(caps.num_engines for caps in self._caps.values())
        return max(1, num_engines)

    def open_session(self) -> Decoders:
        """For one thread at a time. It takes memory on the device from its first bitstream on."""
        session = NvdecSession(self._nvc, self._device, self.surfaces)
        return {name: NvdecDecoder(CODECS[name], caps, session) for name, caps in self._caps.items()}


def open_nvdec(device: Device) -> tuple[Nvdec | None, str]:
    """The video engines, for the codecs that they decode bit for bit, as a trial has shown, and a sentence about it.
    None if there are no such codecs. The device's context must be current. Raises nothing."""
    if os.environ.get(ENV) == "0":
        return None, f"HEVC is decoded on the CPU: {ENV}=0 is set"
    try:
        nvc = importlib.import_module("PyNvVideoCodec")
        caps = decode_caps()
    except Exception as e:  # loads the driver's libraries, and fails in many ways
        return None, f"HEVC is decoded on the CPU: {brief(e)}"
    if not caps:
        return None, "HEVC is decoded on the CPU: this GPU's video engines decode none"
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
    """What is wrong with two small pictures, the second one predicted from the first, or with their sum; nothing if
    they are right. Compiles the kernel that sums."""
    frames = moving_gradients(2, MIN_PICTURE, MIN_PICTURE)
    shape = frames.shape[0], *frames.shape[2:]
    try:
        bitstream = codec.encode(frames)
        found = decoder.decode(bitstream, *shape)
        is_equal = found.host is not None and torch.equal(found.host, frames)  # now: it is the session's memory
        summed = decoder.decode(bitstream, *shape, with_sum=True)
    except Exception as e:
        return f"a trial failed: {brief(e)}"
    if not (found.is_on_device and summed.is_on_device):
        return "a trial was not decoded on NVDEC"
    if not is_equal:
        return "a trial gave other pixels"
    return "" if summed.frame_sum == sum_of_frames(frames) else "a trial gave another frame sum"


def _copy_rows(surface: Any, place: torch.Tensor) -> None:
    """``surface``: whatever speaks DLPack."""
    place.copy_(from_dlpack(surface)[: len(place)], non_blocking=True)


def _download(frames: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(frames, non_blocking=True)


def _download_sum(frames: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(frame_sum(frames), non_blocking=True)
