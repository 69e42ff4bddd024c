"""The stored format of a segment, without I/O. ``docs/format.md`` describes it for other implementations.

A door of its own, for whoever writes segments, takes them apart or signs them. What others need of it is behind the
codec's door.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
