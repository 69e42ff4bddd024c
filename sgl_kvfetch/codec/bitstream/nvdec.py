"""Decode the HEVC bitstreams of `hevc` on the GPU's video engines, through PyNvVideoCodec 2.2, into frames on the host.

A bitstream's table gives NVDEC what it takes: one access unit a packet, without a demuxer. A decoder writes its
surfaces on its stream, and reuses them from its next ``Decode`` on. The copy from a surface to the host is launched on
the same stream before that, so no thread has to wait for it.

What the current GPU's video decoders can do is asked of the driver's library, and tried.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from sgl_kvfetch.codec.bitstream.base import DecodedFrames, Decoders, FrameDecoder, PictureShape
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS, HevcCodec
from sgl_kvfetch.codec.cuda_streams import Device, Stream, why_no_gpu
from sgl_kvfetch.codec.layout.frames import MIN_PICTURE
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import LimitedLogger, brief

_limited = LimitedLogger(logging.getLogger(__name__))

_DECODE_LIBRARY = "libnvcuvid.so.1"
ENCODE_LIBRARY = "libnvidia-encode.so.1"  # PyNvVideoCodec loads it even to decode

# Enumerators of the Video Codec SDK's cuviddec.h.
_CUVID_HEVC = 8
CHROMA = {"hevc": 3, "hevc420": 1}  # by codec: 4:4:4 and 4:2:0


class DecodeCaps(ctypes.Structure):
    """The struct CUVIDDECODECAPS of the Video Codec SDK's cuviddec.h."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bit_depth_minus_8", ctypes.c_uint),
        ("reserved1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("num_engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort),
        ("min_height", ctypes.c_ushort),
        ("has_histogram", ctypes.c_ubyte),
        ("histogram_bits", ctypes.c_ubyte),
        ("max_histogram_bins", ctypes.c_ushort),
        ("reserved3", ctypes.c_uint * 10),
    )


def decode_caps() -> dict[str, DecodeCaps]:
    """Return the capabilities for 8-bit HEVC of the GPU whose context is current, by codec name. Codecs that it cannot
    decode are left out. Raises OSError if the library cannot be loaded."""
    library = ctypes.CDLL(_DECODE_LIBRARY)
    found = {name: _decode_caps_of(library, chroma) for name, chroma in CHROMA.items()}
    return {name: caps for name, caps in found.items() if caps is not None}


def _decode_caps_of(library: ctypes.CDLL, chroma: int) -> DecodeCaps | None:
    caps = DecodeCaps(codec=_CUVID_HEVC, chroma=chroma)
    failed = library.cuvidGetDecoderCaps(ctypes.byref(caps))
    return None if failed or not caps.is_supported else caps


def supports_size(caps: DecodeCaps, width: int, height: int) -> bool:
    """Return whether NVDEC supports pictures of this size, in pixels."""
    macroblocks = -(-width // 16) * -(-height // 16)
    return bool(
        caps.min_width <= width <= caps.max_width
        and caps.min_height <= height <= caps.max_height
        and macroblocks <= caps.max_macroblocks
    )


def moving_gradients(num_frames: int) -> torch.Tensor:
    """Return frames for a trial, uint8 ``(frames, 3, MIN_PICTURE, MIN_PICTURE)``, each predictable from the one
    before."""
    rows, columns = torch.meshgrid(torch.arange(MIN_PICTURE), torch.arange(MIN_PICTURE), indexing="ij")
    planes = torch.stack([(rows * (plane + 1) + columns) // 2 for plane in range(3)])
    return torch.stack([(planes + frame) % 256 for frame in range(num_frames)]).to(torch.uint8)


# Surfaces of one decoder: PyNvVideoCodec asks for as many as NVIDIA's parser does and four more, and two for output.
# The parser's number is an estimate; `scripts/gpu_check` compares the sum with the memory that is really used.
NUM_SURFACES = 4 + 4 + 2
MAX_SURFACE_BYTES = 256 << 20  # of all decoders of a process together


def surface_bytes(planes_a_picture: int, width: int, height: int) -> int:
    """Estimate the device memory of a decoder, in bytes. ``planes_a_picture``: 3 for 4:4:4, 1 for 4:2:0, which has half
    as much chroma as luma. ``width``, ``height``: of its pictures, in pixels."""
    rows = 3 * height if planes_a_picture == 3 else height * 3 // 2
    return NUM_SURFACES * rows * width


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


class Nvdec:
    """The video engines of one GPU, and the process's decoders on them, each for pictures of one size. Thread-safe.

    No decoder is reconfigured, and none is destroyed while SGLang serves: PyNvVideoCodec holds the interpreter lock in
    both, while the driver waits for the device. Sessions share the decoders instead. There are as many of a size as
    were ever used at the same time, within the memory for their surfaces. A decoder that has failed is destroyed when
    another needs its room: that may hold up the scheduler, but otherwise the CPU would decode from then on.
    """

    def __init__(self, nvc: Any, device: Device, caps: Mapping[str, DecodeCaps]) -> None:
        """``nvc``: the module PyNvVideoCodec. ``caps``: the codecs to decode, by name."""
        self.nvc = nvc
        self.device = device
        self.torch_device = device.torch_device
        self.codecs = tuple(caps)
        self.surface_limit_bytes: int | None = MAX_SURFACE_BYTES  # may be set at any time; None: no limit
        self.held_surface_bytes = 0  # by all decoders
        self._caps = caps
        self._lock = Lock()  # guards the fields above and below that change
        self._idle: defaultdict[PictureSize, list[_Decoder]] = defaultdict(list)
        self._broken: list[_Decoder] = []  # have raised, and may be in any state

    @property
    def num_engines(self) -> int:
        """The number of engines. A session uses one, so with fewer sessions some engines are idle."""
        num_engines: int = max(caps.num_engines for caps in self._caps.values())
        return max(1, num_engines)

    def open_session(self) -> Decoders:
        """Open a session for one thread at a time. It takes no device memory until its first bitstream."""
        return {name: NvdecDecoder(self, HEVC_CODECS[name], caps) for name, caps in self._caps.items()}

    @contextmanager
    def borrow_decoder(self, size: PictureSize) -> Iterator[_Decoder]:
        """Lend a decoder. It is not lent again after an exception. Raises `_NoDecoderError`."""
        with self._lock:
            decoder = self._idle[size].pop() if self._idle[size] else None
        decoder = decoder or self._create_decoder(size)
        is_sound = False
        try:
            yield decoder
            is_sound = True
        except BaseException:
            self.device.mark(decoder.stream).synchronize()  # wait for copies to memory that will be used again
            raise
        finally:
            with self._lock:
                (self._idle[size] if is_sound else self._broken).append(decoder)

    def _create_decoder(self, size: PictureSize) -> _Decoder:
        """Make a decoder, after dropping broken ones if there is no room. Raises _NoDecoderError if there is none."""
        nvc, num_bytes = self.nvc, surface_bytes(*size)
        with self._lock:
            while self._broken and not self._has_room(num_bytes):
                broken = self._broken.pop()
                broken.handle = None
                self.held_surface_bytes -= broken.num_bytes
            if not self._has_room(num_bytes):
                raise _NoDecoderError(f"other decoders leave no room for one of {size.width}x{size.height}")
            stream = self.device.new_stream()
            self.held_surface_bytes += num_bytes
        try:
            handle = nvc.CreateDecoder(
                gpuid=self.device.torch_device.index or 0,
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
            self._release_surfaces(num_bytes)
            raise _NoDecoderError(f"NVDEC gave no decoder for {size.width}x{size.height}: {brief(e)}") from e
        return _Decoder(handle, stream, num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        limit, held = self.surface_limit_bytes, self.held_surface_bytes
        return limit is None or not held or held + num_bytes <= limit  # a single decoder may have any size

    def _release_surfaces(self, num_bytes: int) -> None:
        with self._lock:
            self.held_surface_bytes -= num_bytes


class NvdecDecoder(FrameDecoder):
    """Decodes one HEVC codec for a session, on decoders that sessions share. Falls back to the CPU for pictures whose
    size NVDEC does not support, and while NVDEC gives no decoder."""

    def __init__(self, nvdec: Nvdec, codec: HevcCodec, caps: DecodeCaps) -> None:
        self._nvdec = nvdec
        self._device = nvdec.device
        self._codec = codec
        self._caps = caps
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned; as large as the largest frames so far

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> DecodedFrames:
        num_frames, height, width = shape
        access_units = self._codec.access_units(bitstream, num_frames)
        if supports_size(self._caps, width, height):
            try:
                return DecodedFrames(self._decode(access_units, shape), on_cpu=False)
            except (_NoDecoderError, torch.OutOfMemoryError) as e:
                _limited.warning("nvdec", f"{self._codec.name} is decoded on the CPU: {e}")
        return DecodedFrames(self._codec.decode(bitstream, shape), on_cpu=True)

    def _decode(self, access_units: Sequence[memoryview], shape: PictureShape) -> torch.Tensor:
        """Decode a bitstream on NVDEC, and wait for the device. Raises CorruptError for the bitstream,
        `_NoDecoderError` or torch's out-of-memory error otherwise."""
        num_frames, height, width = shape
        frames = self._pinned((num_frames, 3, height, width))
        with self._nvdec.borrow_decoder(PictureSize(self._codec.planes_a_picture, width, height)) as decoder:
            self.fill_frames(decoder, access_units, frames)
            self._device.mark(decoder.stream).synchronize()
        return frames

    def fill_frames(self, decoder: _Decoder, access_units: Sequence[memoryview], frames: torch.Tensor) -> None:
        """Launch the copies of all pictures of a bitstream to ``frames``. Raises CorruptError."""
        expected, num_decoded = len(access_units), 0
        with self._device.launching(decoder.stream) as launch:
            for access_unit in (*access_units, None):
                for surface in self._surfaces(decoder, access_unit):
                    if num_decoded == expected:
                        raise CorruptError(f"{self._codec.name} bitstream decodes to more than {expected} pictures")
                    launch(self._copy(decoder, surface, frames, num_decoded))
                    num_decoded += 1
        if num_decoded != expected:
            raise CorruptError(f"{self._codec.name} bitstream decodes to {num_decoded} pictures, expected {expected}")

    def _surfaces(self, decoder: _Decoder, access_unit: memoryview | None) -> Sequence[Any]:
        """Decode one access unit; None ends the bitstream. Copy the returned surfaces before the next call."""
        packet = self._nvdec.nvc.PacketData()
        data = np.frombuffer(access_unit or b"\0", np.uint8)  # keeps the memory alive during the call
        if access_unit is None:
            packet.decode_flag = self._nvdec.nvc.VideoPacketFlag.ENDOFSTREAM
        elif not access_unit:  # NVDEC would take it for the end
            raise CorruptError(f"{self._codec.name} bitstream has an empty picture")
        else:
            packet.bsl_data, packet.bsl = data.ctypes.data, data.size
            packet.decode_flag = self._nvdec.nvc.VideoPacketFlag.ENDOFPICTURE
        try:
            surfaces: Sequence[Any] = decoder.handle.Decode(packet)
        except Exception as e:
            raise CorruptError(f"{self._codec.name} bitstream does not decode on NVDEC: {brief(e)}") from e
        return surfaces

    def _copy(self, decoder: _Decoder, surface: Any, frames: torch.Tensor, index: int) -> Callable[[], object]:
        """Return the copy of picture ``index`` to its place in ``frames``. A 4:4:4 picture has three planes, stacked
        vertically. Of a 4:2:0 picture only the luma, which comes first, is copied: it is one plane of ours."""
        num_frames, _, height, width = frames.shape
        if self._codec.planes_a_picture == 3:
            place, expected = frames[index].flatten(0, 1), (3 * height, width)
        else:
            plane, frame = divmod(index, num_frames)
            place, expected = frames[frame, plane], (height * 3 // 2, width)
        found = tuple(surface.shape)
        if found != expected:
            raise CorruptError(f"{self._codec.name} picture has rows and columns {found}, expected {expected}")
        # torch would ask the surface for its device first, and then select a stream: fifteen times as slow.
        rows = from_dlpack(surface.__dlpack__(stream=decoder.stream.cuda_stream))[: len(place)]
        return lambda: place.copy_(rows, non_blocking=True)

    def _pinned(self, shape: Sequence[int]) -> torch.Tensor:
        """Return pinned memory. No copy to it is pending: every user waits for the device."""
        num_bytes = math.prod(shape)
        if self._host.numel() < num_bytes:
            self._host = self._device.pinned(num_bytes)
        return self._host[:num_bytes].view(*shape)


def open_nvdec(device: Device) -> tuple[Nvdec | None, str]:
    """Open the video engines, for the codecs that pass a bit-exact trial. Return them, or None if there are no such
    codecs, and a sentence about the result. The device's context must be current. Raises nothing."""
    if why := why_no_gpu():
        return None, f"HEVC is decoded on the CPU: {why}"
    try:
        nvc = importlib.import_module("PyNvVideoCodec")
        caps = decode_caps()
    except Exception as e:  # loading the driver's libraries fails in many ways
        return None, f"HEVC is decoded on the CPU: {brief(e)}"
    if not caps:
        return None, "HEVC is decoded on the CPU: this GPU's video engines do not decode it"
    found = Nvdec(nvc, device, caps)
    decoders = found.open_session()
    usable, on_cpu = {}, ""
    for name, codec in HEVC_CODECS.items():
        if reason := _trial(codec, decoders[name]) if name in caps else "its chroma format is not supported":
            on_cpu += f"; {name} on the CPU: {reason}"
        else:
            usable[name] = caps[name]
    about = f"decoded on NVDEC, {found.num_engines} engines: {', '.join(usable) or 'nothing'}{on_cpu}"
    return (Nvdec(nvc, device, usable) if usable else None), about


def open_current_nvdec() -> tuple[Nvdec | None, str]:
    """Do `open_nvdec` for torch's current GPU."""
    if not torch.cuda.is_available():
        return None, f"HEVC is decoded on the CPU: torch {torch.__version__} finds no usable GPU"
    torch.zeros(1, device="cuda")  # the video libraries need a current CUDA context
    return open_nvdec(Device(torch.device("cuda", torch.cuda.current_device())))


def open_nvdec_alone(index: int) -> tuple[Nvdec | None, str]:
    """Do `open_nvdec` for GPU ``index`` in a process that does not use it yet. A process takes some hundred MB of the
    GPU's memory, so it begins to use it only if there is a decoder to try."""
    if not why_no_gpu():
        if importlib.util.find_spec("PyNvVideoCodec") is None:
            return None, "HEVC is decoded on the CPU: PyNvVideoCodec is not installed"
        try:
            torch.zeros(1, device=torch.device("cuda", index))
        except Exception as e:  # torch without CUDA asserts, and a driver fails in many ways
            return None, f"HEVC is decoded on the CPU: {brief(e)}"
    return open_nvdec(Device(torch.device("cuda", index)))


def _trial(codec: HevcCodec, decoder: FrameDecoder) -> str:
    """Decode six small pictures, each predicted from the one before: more than a decoder holds back. Return what is
    wrong with them; an empty string if nothing is."""
    frames = moving_gradients(6)
    try:
        found = decoder.decode(codec.encode(frames), (frames.shape[0], *frames.shape[2:]))
    except Exception as e:
        return f"a trial failed: {brief(e)}"
    if found.on_cpu:
        return "a trial was not decoded on NVDEC"
    return "" if torch.equal(found.frames, frames) else "a trial gave other pixels"
