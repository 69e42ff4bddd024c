"""Quantisers between KV values and 8-bit integers.

A door of its own, for kernels and those who launch them. What others need of it is behind the codec's door.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
