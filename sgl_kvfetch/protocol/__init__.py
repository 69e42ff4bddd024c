"""What the engine's process and its data plane both know: their messages, the memory that they share, what lies in it,
and the config.

It knows the codec and no store, and neither half of the product: the engine's half (`engine`) and the data plane
(`plane`) meet here alone.
"""

from sgl_kvfetch.doors import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
