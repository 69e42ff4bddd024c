"""Gather statistics of windows of text, a layer at a time: how K and V vary, and how much an error in them costs.

An error of K or V changes what attention adds to the residual stream at the tokens that follow. Let J_i be the
derivative of that, at position i, by a token's K or V. A change of the stream costs about as much as it is large beside
the stream itself, whatever its direction, since the next layer norms the stream first. So with x_i for the stream
behind the layer, the KL divergence of the next tokens is about

    e^T W e / 2,    W = gain * mean over i of J_i^T J_i / |x_i|^2,

with one gain for the whole model. W is gathered without J: let r_i be normal with the standard deviation 1 / |x_i|, and
g the gradient of sum r_i^T y_i, where y_i is what attention adds. Then E[g g^T] is the sum of J_i^T J_i / |x_i|^2
(Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1989). One layer's gradients are enough.
With the attention of plain transformers written out, W of V is attention squared times the Gram matrix of the output
projection, and W of K is queries times queries, weighed by attention squared and by what the value differs from the
output.

docs/codec.md compares this with the Fisher information, which takes gradients of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvfetch.codec.calibrate.layers import KV, Layer, LayeredModel, Past, States
from sgl_kvfetch.codec.calibrate.statistics import Moments
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.types import CellGrid

_DRAWS = 4  # of directions of the stream; each is one backward pass through a layer's attention
# The gain, fitted to SmolLM2-135M. The same factor for all layers changes no choice: only the unit of a step.
_GAIN = 3.4


class Sweep:
    """Passes windows of text through a model once.

    ``fitted``: ``(tokens,)`` each, of which the first ``num_context`` are the context. They make the moments.
    ``held_out``: contexts. ``contexts`` gets their K and V in the coded layers, bfloat16 ``(tokens, layers, heads,
    dim)``, and ``others`` what other layers keep of each, by number.
    """

    def __init__(
        self,
        model: LayeredModel,
        fitted: Sequence[torch.Tensor],
        held_out: Sequence[torch.Tensor],
        num_context: int,
        layers: LayerMap,
        grid: CellGrid,
        seed: int = 0,
    ) -> None:
        self._model, self._layers, self._grid, self._num_context = model, layers, grid, num_context
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._calls = model.calls(len(fitted[0]))
        self._context_calls = model.calls(num_context)
        self._following_calls = model.calls(len(fitted[0]) - num_context, num_context)
        self._streams = [model.embed(window) for window in fitted]
        self._held_out = [model.embed(window[:num_context]) for window in held_out]
        # Of the layer group that is under way: K and V of each window, and the moments.
        self._group: list[list[CellValues]] = [[] for _ in fitted]
        self._moments: Moments | None = None
        self._coded = {number: index for index, number in enumerate(layers.coded)}
        shape = num_context, len(self._coded), model.num_heads
        dims = model.k_head_dim, model.v_head_dim
        self.contexts = [CellValues(*(torch.empty(*shape, d, dtype=torch.bfloat16) for d in dims)) for _ in held_out]
        self.others: list[dict[int, Past]] = [{} for _ in held_out]

    def pass_layer(self, index: int) -> Moments | None:
        """Pass all windows through a layer. Layers come in order. Return the moments of the layer group behind its last
        layer."""
        with self._model.layer(index) as layer:
            if index not in self._coded:
                self._pass_other(layer)
                return None
            coded = self._coded[index]
            group = coded // self._grid.cell_layers
            moments = self._moments or self._new_moments(group)
            for i, hidden in enumerate(self._held_out):
                self._held_out[i], kv = _with_keys(layer.forward(hidden, self._context_calls))
                for whole, x in zip(self.contexts[i], kv, strict=True):
                    whole[:, coded] = x
            for i in range(len(self._streams)):
                self._pass_window(layer, i, moments)
        if coded != self._grid.layers(group)[-1]:
            self._moments = moments
            return None
        for i, parts in enumerate(self._group):
            moments.add_values(i, CellValues(*(torch.cat(x, dim=1) for x in zip(*parts, strict=True))))
            parts.clear()
        self._moments = None
        return moments

    def state(self, num_layers: int) -> dict[str, Any]:
        """Return what `restore` needs after so many layers."""
        return {
            "num_layers": num_layers,
            "streams": self._streams,
            "held_out": self._held_out,
            "group": [[[*values] for values in parts] for parts in self._group],
            "contexts": [[*values] for values in self.contexts],
            "others": [{number: _plain(past) for number, past in kept.items()} for kept in self.others],
            "generator": self._generator.get_state(),
            "moments": self._moments.state() if self._moments else None,
        }

    def restore(self, state: dict[str, Any]) -> int:
        """Go on from a state; return the number of layers that it has passed."""
        self._streams, self._held_out = state["streams"], state["held_out"]
        self._group = [[CellValues(*values) for values in parts] for parts in state["group"]]
        self.contexts = [CellValues(*values) for values in state["contexts"]]
        self.others = [{number: _past(plain) for number, plain in kept.items()} for kept in state["others"]]
        self._generator.set_state(state["generator"])
        num_layers = int(state["num_layers"])
        if state["moments"]:
            num_coded = sum(number < num_layers for number in self._coded)
            self._moments = self._new_moments(num_coded // self._grid.cell_layers)
            self._moments.restore(state["moments"])
        return num_layers

    def _new_moments(self, group: int) -> Moments:
        model = self._model
        sizes = model.k_head_dim, model.v_head_dim, len(self._streams), self._num_context
        return Moments(self._grid, group, *sizes, self._seed)

    def _pass_other(self, layer: Layer) -> None:
        """Pass all windows through a layer that is not coded."""
        for i, hidden in enumerate(self._held_out):
            self._held_out[i], past = layer.forward(hidden, self._context_calls)
            self.others[i][layer.index] = KV(*(x.bfloat16().cpu() for x in past)) if isinstance(past, KV) else past
        for i, hidden in enumerate(self._streams):
            self._streams[i], _ = layer.forward(hidden, self._calls)

    def _pass_window(self, layer: Layer, i: int, moments: Moments) -> None:
        hidden = self._streams[i]
        self._streams[i], kv = _with_keys(layer.forward(hidden, self._calls))
        following, stream = hidden[self._num_context :], self._streams[i][self._num_context :]
        k, v = (x[: self._num_context] for x in kv)
        plain = CellValues(_turned(k, self._layers.rope_of(layer.index), unrotate), v)
        self._group[i].append(CellValues(*(x[:, None].cpu() for x in plain)))
        moments.add_gradients(self._coded[layer.index], i, self._gradients(layer, following, plain, stream))

    def _gradients(
        self, layer: Layer, following: torch.Tensor, plain: CellValues, stream: torch.Tensor
    ) -> list[CellValues]:
        """Return gradients of random projections of what attention adds to ``stream``, with respect to K and V."""
        leaves = CellValues(*(x.clone().requires_grad_(True) for x in plain))
        past = KV(_turned(leaves.k, self._layers.rope_of(layer.index), rotate), leaves.v)
        output = layer.attention_after(following, self._following_calls, past)
        lengths = stream.norm(dim=-1, keepdim=True).to(output.device) * math.sqrt(len(output) / _GAIN)
        draws = []
        for draw in range(_DRAWS):
            direction = torch.randn(output.shape, generator=self._generator).to(output.device) / lengths
            keep = draw + 1 < _DRAWS
            draws.append(CellValues(*torch.autograd.grad(output, leaves, direction, retain_graph=keep)))
        return draws


def _turned(k: torch.Tensor, rope: Rope | None, turn: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Apply ``rotate`` or ``unrotate`` to the keys of a sequence's first tokens. Without a rope, return ``k``."""
    return k if rope is None else turn(k, rope.table(0, len(k), k.device), rope)


def _with_keys(passed: tuple[torch.Tensor, Past]) -> tuple[torch.Tensor, KV]:
    """Return what a layer that has keys and values gave."""
    output, past = passed
    assert isinstance(past, KV), past
    return output, past


def _plain(past: Past) -> list[Any] | None:
    """Return what a layer keeps as torch saves it: keys and values, or two dictionaries of states."""
    return None if past is None else [*past]


def _past(plain: list[Any] | None) -> Past:
    """Undo `_plain`."""
    if plain is None:
        return None
    return States(*plain) if isinstance(plain[0], dict) else KV(*plain)
