"""Quantisers between KV values and 8-bit integers."""

from typing import Literal

PlainQuantiserName = Literal["exact", "uint8", "cachegen"]  # those that need no profile
QuantiserName = Literal[PlainQuantiserName, "klt"]
