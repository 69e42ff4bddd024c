"""Layouts: bijections between integers and frames.

A door of its own, for kernels and pictures. What others need of it is behind the codec's door.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
