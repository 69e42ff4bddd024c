"""A whole store, object by object: list it, summarise it, and delete what has to go.

A door of its own, for the commands that look after a store, and for directories, which delete in the same order.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
