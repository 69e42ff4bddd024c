"""Layouts: bijections between integers and frames.

Kernels and the pictures of segments import from here. All others import from `sgl_kvfetch.codec`.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
