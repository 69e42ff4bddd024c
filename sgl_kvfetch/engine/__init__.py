"""The engine's half: what runs in the engine's process of what the product does, whichever engine it is.

`DataPlane` is the engine's end of the line to its data plane. It starts, watches and restarts the process that serves,
sends commands, and gives out answers.

It knows the protocol. It opens no store and decodes nothing, and imports neither the data plane nor sglang.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
