"""Destroys NVDEC's decoders, so that what comes next must make some."""

from __future__ import annotations

from sgl_kvfetch.codec.bitstream.nvdec import Nvdec


def drop_decoders(nvdec: Nvdec) -> None:
    """Destroy all decoders, of which no session uses any."""
    for decoder in (*nvdec._broken, *(each for idle in nvdec._idle.values() for each in idle)):
        decoder.handle = None
        nvdec._release_surfaces(decoder.num_bytes)
    nvdec._idle.clear()
    nvdec._broken.clear()
