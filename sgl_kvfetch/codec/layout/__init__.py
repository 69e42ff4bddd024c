"""Layouts: bijections between integers and frames.

Kernels and the pictures of segments import from here. All others import from `sgl_kvfetch.codec`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
