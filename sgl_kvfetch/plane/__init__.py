"""The data plane: everything between the engine and the store, in a process beside the engine's, one a rank.

It looks up, fetches, decodes and restores pages, and chooses how to read them (``fetch``), gathers, encodes and writes
segments (``write``). `DataPlane` is the engine's end of
the line. The config is parsed here.

It knows stores and the codec. It imports no sglang, and takes nothing for granted about the process at
the other end: if either dies, the other one goes on.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
