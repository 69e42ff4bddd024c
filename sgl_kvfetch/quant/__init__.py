"""Quantisers between KV values and 8-bit integers."""

from sgl_kvfetch.quant.base import CellPlace, CellValues, Part, Quantised, Quantiser
from sgl_kvfetch.quant.registry import make_quantiser, quantiser_from_identity

__all__ = ["CellPlace", "CellValues", "Part", "Quantised", "Quantiser", "make_quantiser", "quantiser_from_identity"]
