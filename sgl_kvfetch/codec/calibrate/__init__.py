"""Calibrate the ``klt`` quantiser: measure how a model's KV cache varies and how much errors in it cost.

A door of its own, for `kvfetch calibrate`. What others need of it is behind the codec's door.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
