"""Quantisers between KV values and 8-bit integers.

A door of its own, for kernels and those who launch them. What others need of it is behind the codec's door.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
