"""The stored format of a segment, without I/O. ``docs/format.md`` describes it for other implementations.

Code that writes segments, takes them apart or signs them imports from here. All other code imports from
`sgl_kvfetch.codec`.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
