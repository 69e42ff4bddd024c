"""Lossless codecs between frames and bitstreams: one file a codec. The manifest records their names.

Kernels, the command line and GPU decoders import from here. All others import from `sgl_kvfetch.codec`.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
