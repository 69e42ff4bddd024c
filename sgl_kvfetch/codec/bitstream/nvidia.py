"""What the NVDEC decoder and the NVENC encoder share: the capabilities of the current GPU's engines, and their trials.

The driver's libraries are asked for the capabilities. PyNvVideoCodec 2.2.4 is not: for encoding, it
always asks about the first GPU. If that GPU has no NVENC, as H100, H200 and A100 have none, it also leaves a CUDA
context of its own current on the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Any

import torch

_DECODE_LIBRARY = "libnvcuvid.so.1"
ENCODE_LIBRARY = "libnvidia-encode.so.1"
_CUDA_LIBRARY = "libcuda.so.1"

# Enumerators of the Video Codec SDK's cuviddec.h.
_CUVID_HEVC = 8
CHROMA = {"hevc": 3, "hevc420": 1}  # by codec: 4:4:4 and 4:2:0

# From the Video Codec SDK's nvEncodeAPI.h. 12.1 is the oldest interface that PyNvVideoCodec 2.2 works with; newer
# drivers support it too.
_API_VERSION = 12 | 1 << 24
_CUDA = 1  # device type
_NO_ENCODER = (1, 2)  # status: no device can encode; this device cannot
_HEVC_GUID = (0x790CDC88, 0x4522, 0x4D7B, (0x94, 0x25, 0xBD, 0xA9, 0x97, 0x5F, 0x76, 0x03))
_WIDTH_MAX, _HEIGHT_MAX, _MACROBLOCKS_MAX, _WIDTH_MIN, _HEIGHT_MIN = 16, 17, 31, 45, 46
_IS_444, _IS_LOSSLESS, _NUM_ENGINES = 33, 34, 49

_MESSAGE_CHARS = 240


class DecodeCaps(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h."""

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


@dataclass(frozen=True, slots=True)
class EncodeCaps:
    """What NVENC supports, sizes in pixels. A macroblock is 16x16."""

    min_width: int
    min_height: int
    max_width: int
    max_height: int
    max_macroblocks: int
    num_engines: int


class Guid(ctypes.Structure):
    """GUID."""

    _fields_ = (
        ("data1", ctypes.c_uint32),
        ("data2", ctypes.c_uint16),
        ("data3", ctypes.c_uint16),
        ("data4", ctypes.c_uint8 * 8),
    )


class Functions(ctypes.Structure):
    """NV_ENCODE_API_FUNCTION_LIST."""

    _fields_ = (("version", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("functions", ctypes.c_void_p * 318))


class OpenParams(ctypes.Structure):
    """NV_ENC_OPEN_ENCODE_SESSION_EX_PARAMS."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("device_type", ctypes.c_int),
        ("device", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("api_version", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint32 * 253),
        ("reserved2", ctypes.c_void_p * 64),
    )


class CapsParam(ctypes.Structure):
    """NV_ENC_CAPS_PARAM."""

    _fields_ = (("version", ctypes.c_uint32), ("cap", ctypes.c_int), ("reserved", ctypes.c_uint32 * 62))


# Indices and prototypes of entries of NV_ENCODE_API_FUNCTION_LIST.
_GET_CAPS = 7, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, Guid, ctypes.c_void_p, ctypes.c_void_p)
_DESTROY = 27, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OPEN = 29, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def encode_caps() -> dict[str, EncodeCaps]:
    """Return the capabilities for lossless 8-bit HEVC of the GPU whose context is current, by codec name. Codecs that
    it cannot encode are left out. Raises OSError if the driver's libraries are missing or fail."""
    functions = Functions(version=_struct_version(2))
    failed = ctypes.CDLL(ENCODE_LIBRARY).NvEncodeAPICreateInstance(ctypes.byref(functions))
    if failed in _NO_ENCODER:  # the library is a stub
        return {}
    _require(failed, "cannot be used: the driver may be too old")
    session = ctypes.c_void_p()
    try:
        return _encode_caps_of(functions, session) if _open(functions, session) else {}
    finally:
        if session:  # a session that failed to open must be destroyed as well
            _function(functions, _DESTROY)(session)


def _open(functions: Functions, session: ctypes.c_void_p) -> bool:
    """Open a session. Return False if this GPU has no encoder. Raises OSError if the driver fails."""
    context = ctypes.c_void_p()
    failed = ctypes.CDLL(_CUDA_LIBRARY).cuCtxGetCurrent(ctypes.byref(context))
    if failed or not context:
        raise OSError(f"{_CUDA_LIBRARY}: no CUDA context is current")
    params = OpenParams(version=_struct_version(1), device_type=_CUDA, device=context, api_version=_API_VERSION)
    failed = _function(functions, _OPEN)(ctypes.byref(params), ctypes.byref(session))
    if failed in _NO_ENCODER:
        return False
    _require(failed, "could not open an encode session")
    return True


def _encode_caps_of(functions: Functions, session: ctypes.c_void_p) -> dict[str, EncodeCaps]:
    hevc = Guid(*_HEVC_GUID[:3], (ctypes.c_uint8 * 8)(*_HEVC_GUID[3]))
    get_caps = _function(functions, _GET_CAPS)

    def ask(cap: int) -> int:
        value = ctypes.c_int()
        params = CapsParam(version=_struct_version(1), cap=cap)
        failed = get_caps(session, hevc, ctypes.byref(params), ctypes.byref(value))
        return 0 if failed else value.value

    if not ask(_IS_LOSSLESS):
        return {}
    caps = EncodeCaps(
        min_width=ask(_WIDTH_MIN),
        min_height=ask(_HEIGHT_MIN),
        max_width=ask(_WIDTH_MAX),
        max_height=ask(_HEIGHT_MAX),
        max_macroblocks=ask(_MACROBLOCKS_MAX),
        num_engines=ask(_NUM_ENGINES),
    )
    return {"hevc": caps, "hevc420": caps} if ask(_IS_444) else {"hevc420": caps}


def _function(functions: Functions, which: tuple[int, Any]) -> Callable[..., int]:
    place, prototype = which
    function: Callable[..., int] = prototype(functions.functions[place])
    return function


def _struct_version(version: int) -> int:
    return _API_VERSION | version << 16 | 7 << 28


def _require(status: int, what: str) -> None:
    if status:
        raise OSError(f"{ENCODE_LIBRARY} {what} (NVENC error {status})")


def supports_size(caps: DecodeCaps | EncodeCaps, width: int, height: int) -> bool:
    """Return whether an engine supports pictures of this size, in pixels."""
    macroblocks = -(-width // 16) * -(-height // 16)
    return bool(
        caps.min_width <= width <= caps.max_width
        and caps.min_height <= height <= caps.max_height
        and macroblocks <= caps.max_macroblocks
    )


def pass_trials(
    codecs: Collection[str], supported: Container[str], trial: Callable[[str], str]
) -> tuple[list[str], str]:
    """Try out those of ``codecs`` that are supported. Return those that pass, and a description of the result.

    ``trial`` takes a codec's name and returns what is wrong; an empty string if nothing is.
    """
    usable, on_cpu = [], ""
    for name in codecs:
        reason = trial(name) if name in supported else "its chroma format is not supported"
        if reason:
            on_cpu += f"; {name} on the CPU: {reason}"
        else:
            usable.append(name)
    return usable, f"{', '.join(usable) or 'nothing'}{on_cpu}"


def moving_gradients(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Return frames for a trial, uint8 ``(frames, 3, height, width)``, each predictable from the one before."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    planes = torch.stack([(rows * (plane + 1) + columns) // 2 for plane in range(3)])
    return torch.stack([(planes + frame) % 256 for frame in range(num_frames)]).to(torch.uint8)


def brief(error: Exception) -> str:
    """Return an exception's message in one line: PyNvVideoCodec's spread over several, and the first says little."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE_CHARS]
