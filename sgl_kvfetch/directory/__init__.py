"""A store in a directory: objects as files, and a catalog of them in SQLite.

`LocalStore` is a `Store` like any client, and has its directory alone (``owner``). It bounds the disk (``room``),
deletes what expired, and repairs the catalog from the files (``repair``). `FrontStore` is in front of another one.

It knows the interface of stores and the stored format's manifests. It never opens a socket, and trusts no file that it
has not checked.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
