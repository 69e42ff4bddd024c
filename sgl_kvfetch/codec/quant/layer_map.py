"""The layer map: what each layer of a model keeps for a token, where SGLang has it, and how K is rotated.

Layers of a model differ. Some attend to all tokens and some to a window; some keep a state instead of K and V, or read
the K and V of another layer; some turn K by one base, some by another, some not at all. SGLang puts them into pools
accordingly, and numbers the layers of each pool from 0. A profile is of the layers in the pool of K and V, in that
order: they are *coded*. `calibrate.layer_map` makes a map, and `plugin.identity` compares it with SGLang's pools.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.codec.quant.rope import Rope, Rotations
from sgl_kvfetch.types import MAX_LAYERS


class Pool(StrEnum):
    """Where SGLang has what a layer keeps."""

    KV = "kv"  # K and V of every token
    WINDOW = "window"  # K and V of the last tokens, in a pool of their own
    STATE = "state"  # one state, which stands for all tokens before it
    NONE = "none"  # nothing: the layer reads another layer's K and V


# Different ones of a model: those that SGLang serves have one or two. Each span has a table of all of them.
MOST_ROTATIONS = 16


class ModelLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of a model.

    ``window``: how many tokens it attends to; None if all. ``rotation``: which of the map's rotations turns its K; None
    if K is coded as it is: it has no rotation, or one that is not known.
    """

    pool: Pool = Pool.KV
    window: Annotated[int, Meta(ge=1)] | None = None
    rotation: Annotated[int, Meta(ge=0)] | None = None


class LayerMap(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a model, in its order. Raises ValueError for layers and rotations that do not fit together."""

    layers: Annotated[tuple[ModelLayer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    rotations: tuple[Rope, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rotations) > MOST_ROTATIONS:
            raise ValueError(f"its layers have {len(self.rotations)} rotations, expected {MOST_ROTATIONS} at most")
        named = {layer.rotation for layer in self.layers} - {None}
        if named != set(range(len(self.rotations))):
            raise ValueError(f"its layers have the rotations {sorted(named, key=str)} of {len(self.rotations)}")
        if any(layer.rotation is not None and layer.pool != Pool.KV for layer in self.layers):
            raise ValueError("a layer that is not coded has a rotation")
        if len({(rope.rotary_dim, rope.interleaved) for rope in self.rotations}) > 1:
            raise ValueError("its rotations turn different pairs of channels")

    @property
    def coded(self) -> tuple[int, ...]:
        """The numbers, in the model, of the layers that a profile is of."""
        return self.of_pool(Pool.KV)

    def of_pool(self, pool: Pool) -> tuple[int, ...]:
        return tuple(number for number, layer in enumerate(self.layers) if layer.pool == pool)

    def rope_of(self, layer: int) -> Rope | None:
        """Return what turns K of a layer of the model."""
        which = self.layers[layer].rotation
        return None if which is None else self.rotations[which]

    def coded_rotations(self) -> Rotations | None:
        """Return the rotations of the coded layers; None if there is none."""
        if not self.rotations:
            return None
        of_layers = [self.layers[number].rotation for number in self.coded]
        ropes = self.rotations
        if None in of_layers:
            first = ropes[0]
            still = Rope(inv_freq=(0.0,) * len(first.inv_freq), interleaved=first.interleaved)
            ropes = (*ropes, still)
        return Rotations(ropes, tuple(len(ropes) - 1 if which is None else which for which in of_layers))
