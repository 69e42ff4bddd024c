"""Layer maps of models, without the models."""

from __future__ import annotations

from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer
from sgl_kvfetch.codec.quant.rope import Rope


def plain_layers(num_layers: int, rope: Rope | None = None) -> LayerMap:
    """Return the map of a model whose layers all attend to all tokens, and rotate alike."""
    layer = ModelLayer(rotation=None if rope is None else 0)
    return LayerMap(layers=(layer,) * num_layers, rotations=() if rope is None else (rope,))
