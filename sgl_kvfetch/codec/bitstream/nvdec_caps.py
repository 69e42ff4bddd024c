"""Ask the driver's video library what the video engines of the current GPU can decode."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvcuvid.so.1"

# Enumerators of the Video Codec SDK's cuviddec.h.
_HEVC = 8
CHROMA = {"hevc": 3, "hevc420": 1}  # by codec: 4:4:4 and 4:2:0


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
    library = ctypes.CDLL(LIBRARY)
    found = {name: _caps_of(library, chroma) for name, chroma in CHROMA.items()}
    return {name: caps for name, caps in found.items() if caps is not None}


def _caps_of(library: ctypes.CDLL, chroma: int) -> DecodeCaps | None:
    caps = DecodeCaps(codec=_HEVC, chroma=chroma)
    failed = library.cuvidGetDecoderCaps(ctypes.byref(caps))
    return None if failed or not caps.is_supported else caps
