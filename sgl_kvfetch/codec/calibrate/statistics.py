"""Statistics of K and V for calibration: how they vary, and how much an error in them costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.types import CellGrid

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
