"""The stored format of a segment, without I/O. ``docs/format.md`` describes it for other implementations.

Code that writes segments, takes them apart or signs them imports from here. All other code imports from
`sgl_kvfetch.codec`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
