"""The stored format and what makes it: quantisers, layouts, codecs, segments, manifests and calibration.

Values of a cell become 8-bit integers (``quant``), integers become frames (``layout``), frames become a bitstream
(``bitstream``), and bitstreams become a segment with its manifest (``container``). Each step has an inverse.
``calibrate`` makes a model's profile. The package can be used alone, as a library.

It uses torch, PyAV, zstd and, in one file, PyNvVideoCodec, and it launches the Triton kernels. It does no network
I/O, imports neither sglang nor a store, and its results do not depend on a clock.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
