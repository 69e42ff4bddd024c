"""The rotation of models whose layers all rotate alike, which is all that the baselines can take."""

from __future__ import annotations

from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.errors import UnsupportedError


def only_rope(model: LayeredModel) -> Rope:
    """Return the rotation of all layers. Raises UnsupportedError if there are several, or if one is not known."""
    layers, notes = map_layers(model)
    found = {layers.rope_of(number) for number in range(model.num_layers)}
    rope = found.pop()
    if found or rope is None:
        raise UnsupportedError(
            f"{model.path}: expected one rotation of all layers; {'; '.join(notes) or 'it has more'}"
        )
    return rope
