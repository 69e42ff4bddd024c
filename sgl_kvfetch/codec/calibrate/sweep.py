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

What is done so far stands in a file, so that a calibration that was interrupted goes on.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from sgl_kvfetch.codec.calibrate.layers import KV, Exact, Layer, LayeredModel, Past, States
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.log import brief
from sgl_kvfetch.types import CellGrid

logger = logging.getLogger(__name__)
_EVERY_S = 60.0
_STATE_VERSION = 3  # of what the state consists of; files of other versions are not used


class Unfinished:
    """``inputs``: what the calibration depends on. The state that other inputs left is not used."""

    def __init__(self, path: Path, inputs: Sequence[Any]) -> None:
        self._path = path
        self._key = xxhash.xxh3_128_hexdigest(repr([_STATE_VERSION, *map(_plain, inputs)]).encode())
        self._written_s = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Return the state, or None if there is none for these inputs."""
        try:
            found = torch.load(self._path, weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError):
            return None
        return found["state"] if isinstance(found, dict) and found.get("key") == self._key else None

    def is_due(self) -> bool:
        """Return whether the state was last written a minute ago."""
        return time.monotonic() >= self._written_s + _EVERY_S

    def write(self, state: dict[str, Any]) -> None:
        partial = self._path.with_name(f"{self._path.name}.new")
        try:
            torch.save({"key": self._key, "state": state}, partial)
            partial.replace(self._path)
        except (OSError, RuntimeError) as e:  # of torch's writer; only who is interrupted needs the file
            partial.unlink(missing_ok=True)
            logger.warning("kvfetch: what is calibrated so far cannot be kept in %s: %s", self._path, brief(e))
        self._written_s = time.monotonic()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _plain(x: Any) -> Any:
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in x] if isinstance(x, list) else x


# The first tokens of a sequence may be attention sinks, which differ from all others, so the moments leave them out.
MOST_SINKS = 8
_SINK_COST = 100.0  # errors of a sink cost at least this many times the mean of the tokens that follow

_SAMPLE_BYTES = 1 << 28  # limit of the tokens that are kept for fitting their costs, of all layers together
_HALF_LIMIT = 60000.0


class HeadCosts(NamedTuple):
    """The mean cost of a token's errors in K and V, by layer and head, float64.

    ``first``: ``(MOST_SINKS, 2, layers, heads)``, of each of the first tokens. ``usual``: ``(2, layers, heads)``, of
    the tokens behind them.
    """

    first: torch.Tensor
    usual: torch.Tensor


class Moments:
    """Sums over tokens, float64, for the cells of one layer group, and a sample of the tokens.

    The moments of all groups together would need gigabytes. So they exist for one group at a time, until its cells are
    fitted.

    ``first`` ``(blocks, C)`` and ``second`` ``(blocks, C, C)`` are sums of values. ``weights`` are sums of gradients'
    products, of K and of V, ``(layers, blocks, n, n)`` each with n = heads of a cell * dim. ``start_costs``,
    ``(MOST_SINKS, 2, layers, heads)``, holds squared gradient lengths of K and V in the first tokens, which all other
    sums leave out. ``values`` and ``costs`` are of the sampled tokens: K (without its rotation) and V, float16
    ``(tokens, layers, heads, dim)``, and their mean squared gradient lengths, float32 ``(tokens, layers, heads)``.
    """

    def __init__(
        self,
        grid: CellGrid,
        group: int,
        k_head_dim: int,
        v_head_dim: int,
        num_windows: int,
        num_context: int,
        seed: int = 0,
    ) -> None:
        """Make room for the sums of one layer group, in float64, and for a sample of its tokens."""
        self.grid, self.group = grid, group
        self.num_tokens = num_windows * (num_context - MOST_SINKS)
        self.num_windows = num_windows
        layers, blocks = len(grid.layers(group)), grid.num_head_blocks
        heads, dims = grid.num_heads, (k_head_dim, v_head_dim)
        channels = layers * grid.cell_heads * sum(dims)
        self.first = torch.zeros((blocks, channels), dtype=torch.float64)
        self.second = torch.zeros((blocks, channels, channels), dtype=torch.float64)
        self.weights = CellValues(
            *(torch.zeros(layers, blocks, *2 * [grid.cell_heads * d], dtype=torch.float64) for d in dims)
        )
        self.start_costs = torch.zeros((MOST_SINKS, 2, layers, heads), dtype=torch.float64)
        token_bytes = grid.num_layers * heads * (2 * sum(dims) + 8)
        num_kept = min(num_context - MOST_SINKS, max(1, _SAMPLE_BYTES // (token_bytes * num_windows)))
        generator = torch.Generator().manual_seed(seed)
        self._kept = [
            (MOST_SINKS + torch.randperm(num_context - MOST_SINKS, generator=generator)[:num_kept]).sort().values
            for _ in range(num_windows)
        ]
        num_samples = num_windows * num_kept
        self.values = CellValues(*(torch.zeros(num_samples, layers, heads, d, dtype=torch.float16) for d in dims))
        self.costs = CellValues(*(torch.zeros(num_samples, layers, heads) for _ in dims))

    def add_values(self, window: int, values: CellValues) -> None:
        """Add a window's K and V of the layer group, ``(tokens, layers, heads, dim)``, K without its rotation."""
        kept = self._kept[window].to(values.k.device)
        for block in range(self.grid.num_head_blocks):
            x = channels_of(values.tokens(slice(MOST_SINKS, None)), self.grid, block).double()
            self.first[block] += x.sum(0).cpu()
            self.second[block] += (x.T @ x).cpu()
        for whole, x in zip(self.values, values, strict=True):
            whole[self._samples_of(window)] = x[kept].clamp(-_HALF_LIMIT, _HALF_LIMIT).half().cpu()

    def add_gradients(self, layer: int, window: int, draws: Sequence[CellValues]) -> None:
        """Add gradients with respect to K and V of a layer of the group, ``(tokens, heads, dim)`` each; see `sweep`.
        ``layer``: its number among the coded layers."""
        layer -= self.grid.layers(self.group).start
        kept = self._kept[window].to(draws[0].k.device)
        for i, sums in enumerate(self.weights):
            gradients = [draw[i] for draw in draws]
            for g in gradients:
                blocks = g[MOST_SINKS:].reshape(-1, *sums.shape[1:3]).transpose(0, 1).double()
                sums[layer] += (blocks.mT @ blocks).cpu() / len(draws)
            costs = torch.stack([g.square().sum(-1) for g in gradients]).mean(0)
            self.start_costs[:, i, layer] += costs[:MOST_SINKS].cpu()
            self.costs[i][self._samples_of(window), layer] = costs[kept].cpu()

    def state(self) -> list[torch.Tensor]:
        """Return the sums and the sample, for `restore`."""
        return [self.first, self.second, *self.weights, self.start_costs, *self.values, *self.costs]

    def restore(self, state: Sequence[torch.Tensor]) -> None:
        """Take over the sums and the sample of equal moments."""
        self.first, self.second, k_weights, v_weights, self.start_costs, *samples = state
        self.weights = CellValues(k_weights, v_weights)
        self.values, self.costs = CellValues(*samples[:2]), CellValues(*samples[2:])

    def mean(self, block: int) -> torch.Tensor:
        return self.first[block] / self.num_tokens

    def covariance(self, block: int) -> torch.Tensor:
        mean = self.mean(block)
        return self.second[block] / self.num_tokens - mean[:, None] * mean

    def weights_of(self, block: int) -> list[torch.Tensor]:
        """Return the weights of errors in each layer's K, then in each layer's V: twice the share of a token in the KL
        divergence of a next token is e^T W e."""
        return [x / self.num_tokens for w in self.weights for x in w[:, block]]

    @property
    def usual_costs(self) -> CellValues:
        """The mean cost of a token's errors in K and V, ``(1, layers, heads)`` each."""
        diagonals = (w.diagonal(dim1=-2, dim2=-1) for w in self.weights)
        sums = (d.reshape(*d.shape[:2], self.grid.cell_heads, -1).sum(-1).flatten(1) for d in diagonals)
        return CellValues(*(x[None] / self.num_tokens for x in sums))

    @property
    def head_costs(self) -> HeadCosts:
        return HeadCosts(self.start_costs / self.num_windows, torch.cat(self.usual_costs))

    def _samples_of(self, window: int) -> slice:
        num_kept = len(self._kept[0])
        return slice(window * num_kept, (window + 1) * num_kept)


def channels_of(values: CellValues, grid: CellGrid, block: int) -> torch.Tensor:
    """Return a cell's channels, ``(tokens, C)``: by tensor (K, then V), layer, head and dim. ``values``: of the layer
    group, ``(tokens, layers, heads, dim)`` each."""
    cell = values.cell(range(values.k.shape[1]), grid.heads(block))
    return torch.cat([x.flatten(1) for x in cell], dim=1)


def count_sinks(costs: HeadCosts) -> int:
    """Return the number of attention sinks at the start of a sequence. ``costs``: of all layers."""
    usual = costs.usual.clamp_min(torch.finfo(torch.float64).tiny)
    is_sink = ((costs.first / usual).flatten(1).mean(1) > _SINK_COST).tolist()
    return is_sink.index(False) if False in is_sink else MOST_SINKS


_DRAWS = 4  # of directions of the stream; each is one backward pass through a layer's attention
# The gain, fitted to SmolLM2-135M. The same factor for all layers changes no choice: only the unit of a step.
_GAIN = 3.4


class Sweep:
    """Passes windows of text through a model once.

    ``fitted``: ``(tokens,)`` each, of which the first ``num_context`` are the context. They make the moments.
    ``held_out``: contexts. ``contexts`` gets their K and V in the coded layers, bfloat16 ``(tokens, layers, heads,
    dim)``, and ``others`` what is exact of each, by the layer's number: what other layers keep, and keys of indexers.
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
        """Embed the windows. `fitted` and `held_out` are token ids; the first ``num_context`` of a window are its
        context."""
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
        self.others: list[dict[int, Exact]] = [{} for _ in held_out]

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
                for whole, x in zip(self.contexts[i], (kv.k, kv.v), strict=True):
                    whole[:, coded] = x
                if kv.indexer is not None:
                    self.others[i][index] = kv.indexer
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
            "others": [{number: _plain_past(past) for number, past in kept.items()} for kept in self.others],
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
            if isinstance(past, KV):
                past = past._replace(k=past.k.bfloat16().cpu(), v=past.v.bfloat16().cpu())
            self.others[i][layer.index] = past
        for i, hidden in enumerate(self._streams):
            self._streams[i], _ = layer.forward(hidden, self._calls)

    def _pass_window(self, layer: Layer, i: int, moments: Moments) -> None:
        hidden = self._streams[i]
        self._streams[i], kv = _with_keys(layer.forward(hidden, self._calls))
        following, stream = hidden[self._num_context :], self._streams[i][self._num_context :]
        k, v = (x[: self._num_context] for x in (kv.k, kv.v))
        indexer = None if kv.indexer is None else kv.indexer[: self._num_context]
        plain = CellValues(_turned(k, self._layers.rope_of(layer.index), unrotate), v)
        self._group[i].append(CellValues(*(x[:, None].cpu() for x in plain)))
        moments.add_gradients(self._coded[layer.index], i, self._gradients(layer, following, plain, stream, indexer))

    def _gradients(
        self,
        layer: Layer,
        following: torch.Tensor,
        plain: CellValues,
        stream: torch.Tensor,
        indexer: torch.Tensor | None,
    ) -> list[CellValues]:
        """Return gradients of random projections of what attention adds to ``stream``, with respect to K and V.
        ``indexer``: the keys of the layer's indexer, if it has one."""
        leaves = CellValues(*(x.clone().requires_grad_(True) for x in plain))
        past = KV(_turned(leaves.k, self._layers.rope_of(layer.index), rotate), leaves.v, indexer)
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


def _plain_past(past: Exact) -> list[Any] | torch.Tensor | None:
    """Return as torch saves it: keys and values, two dictionaries of states, or an indexer's keys."""
    return [*past] if isinstance(past, KV | States) else past


def _past(plain: list[Any] | torch.Tensor | None) -> Exact:
    """Undo `_plain`."""
    if plain is None or isinstance(plain, torch.Tensor):
        return plain
    return States(*plain) if isinstance(plain[0], dict) else KV(*plain)
