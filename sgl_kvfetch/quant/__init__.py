"""KV <-> integers and scales."""

from sgl_kvfetch.quant.base import Quantised, Quantiser
from sgl_kvfetch.quant.registry import make_quantiser, quantiser_from_identity

__all__ = ["Quantised", "Quantiser", "make_quantiser", "quantiser_from_identity"]
