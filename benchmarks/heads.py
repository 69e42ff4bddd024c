"""Names the KV cache of a model that exists only in a benchmark."""

from __future__ import annotations

from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.types import KVGeometry


def make_heads(geometry: KVGeometry, quantiser: Quantiser) -> HeadSlice:
    """Return all heads of the model. Its names are as long as a server's, since manifests hold them."""
    namespace = Namespace(
        model="weights:" + "0" * 32,
        model_dtype="dtype=bfloat16;quantization=None",
        attention="mha",
        kv_dtype=geometry.dtype,
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        first_layer=0,
        num_heads=geometry.num_heads,
        k_head_dim=geometry.k_head_dim,
        v_head_dim=geometry.v_head_dim,
        quantiser=quantiser.identity,
    )
    return HeadSlice(namespace, range(geometry.num_heads))
