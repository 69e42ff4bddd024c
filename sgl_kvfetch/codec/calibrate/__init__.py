"""Calibrate the ``klt`` quantiser: measure how a model's KV cache varies and how much errors in it cost.

A door of its own, for `kvfetch calibrate`. What others need of it is behind the codec's door.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
