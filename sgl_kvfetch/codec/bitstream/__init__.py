"""Lossless codecs between frames and bitstreams: one file a codec. The manifest records their names.

A door of its own, for kernels, the command line and GPU decoders. What others need of it is behind the codec's door.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
