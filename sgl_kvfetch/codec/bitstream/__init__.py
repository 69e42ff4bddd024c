"""Lossless codecs between frames and bitstreams: one file a codec. The manifest records their names.

Kernels, the command line and GPU decoders import from here. All others import from `sgl_kvfetch.codec`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
