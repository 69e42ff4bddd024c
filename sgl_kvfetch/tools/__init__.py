"""The command ``kvfetch``, and background encoding.

A command's module is imported when the command runs; commands of one subject share a module. ``encoder`` is what
``kvfetch encode`` does.

It knows every other house, and the plugin only for ``kvfetch doctor``. Nothing imports it.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
