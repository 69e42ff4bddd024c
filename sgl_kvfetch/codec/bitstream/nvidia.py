"""Ask the driver's library what the current GPU's video decoders can do, and try them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Container

import torch

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
