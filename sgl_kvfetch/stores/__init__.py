"""Clients of a store: HTTP, S3 with or without an index in Redis, and what all stores share.

A store holds named byte objects, and finds the segments of a prompt (`Store`). A client translates every failure into
`StoreError`; a missing object is None. ``keyed`` checks keys.

It knows manifests, and no tensor. It never decides what to fetch, keeps no KV cache, and
never blocks its event loop.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
