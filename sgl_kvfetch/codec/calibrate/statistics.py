"""Gather statistics of windows of text for calibration: how K and V vary, and how much an error in them costs.

The cost is the Fisher information of the next tokens' distributions with respect to K and V. Let g be the gradient of
the summed log probabilities of tokens *drawn from the model itself*. Then E[g g^T] is the Hessian of the KL divergence
between the distributions before and after a small error e (Amari, "Natural gradient works efficiently in learning",
1998, section 2): KL = e^T E[g g^T] e / 2. Errors of different tokens are independent, so only the block of one token's
channels is needed, averaged over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sgl_kvfetch.codec.calibrate.model import KVModel
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.types import CellGrid

# The first tokens of a sequence may be attention sinks, which differ from all others, so the moments leave them out.
MOST_SINKS = 8
_SINK_COST = 100.0  # errors of a sink cost at least this many times the mean of the tokens that follow

_DRAWS = 2  # of next tokens; each is one backward pass a window
_HALF_LIMIT = 60000.0


class CostSample(NamedTuple):
    """A sample of tokens and the costs of errors in them.

    ``values``: K and V, float16 ``(tokens, layers, heads, dim)``, K without its rotation. ``costs``: mean squared
    gradient lengths of K and V, float32 ``(tokens, layers, heads)``.
    """

    values: CellValues
    costs: CellValues


class Moments:
    """Sums over tokens, float64, for a model's cells.

    For each cell, ``first`` ``(C,)`` and ``second`` ``(C, C)`` are sums of values. ``k_fisher`` and ``v_fisher``,
    ``(layers, blocks, n, n)`` with n = heads of a cell * dim, are sums of gradients. ``start_costs``, ``(MOST_SINKS, 2,
    layers, heads)``, holds squared gradient lengths of K and V in the first tokens, which all other sums leave out.
    """

    def __init__(self, grid: CellGrid, k_head_dim: int, v_head_dim: int) -> None:
        self.grid = grid
        self.num_values = self.num_gradients = self.num_draws = 0
        self.first: dict[tuple[int, int], torch.Tensor] = {}
        self.second: dict[tuple[int, int], torch.Tensor] = {}
        for group, block in grid.cells():
            channels = len(grid.layers(group)) * grid.cell_heads * (k_head_dim + v_head_dim)
            self.first[group, block] = torch.zeros(channels, dtype=torch.float64)
            self.second[group, block] = torch.zeros((channels, channels), dtype=torch.float64)
        shape = grid.num_layers, grid.num_head_blocks
        k, v = grid.cell_heads * k_head_dim, grid.cell_heads * v_head_dim
        self.k_fisher = torch.zeros((*shape, k, k), dtype=torch.float64)
        self.v_fisher = torch.zeros((*shape, v, v), dtype=torch.float64)
        self.start_costs = torch.zeros((MOST_SINKS, 2, grid.num_layers, grid.num_heads), dtype=torch.float64)
        self.samples: list[CostSample] = []

    def add_values(self, values: CellValues) -> None:
        """Add the K and V of a window, ``(tokens, layers, heads, dim)``, K without its rotation."""
        values = values.tokens(slice(MOST_SINKS, None))
        for key in self.first:
            x = channels_of(values, self.grid, *key).double()
            self.first[key] += x.sum(0).cpu()
            self.second[key] += (x.T @ x).cpu()
        self.num_values += len(values.k)

    def add_gradients(self, gradients: CellValues) -> None:
        """Add the gradients of one draw with respect to K and V."""
        for fisher, g in ((self.k_fisher, gradients.k), (self.v_fisher, gradients.v)):
            blocks = g[MOST_SINKS:].reshape(-1, *fisher.shape[:3]).permute(1, 2, 0, 3).double()
            fisher += (blocks.mT @ blocks).cpu()
        self.start_costs += torch.stack([g[:MOST_SINKS].square().sum(-1) for g in gradients], dim=1).cpu()
        self.num_gradients += len(gradients.k) - MOST_SINKS
        self.num_draws += 1

    def mean(self, key: tuple[int, int]) -> torch.Tensor:
        return self.first[key] / self.num_values

    def covariance(self, key: tuple[int, int]) -> torch.Tensor:
        mean = self.mean(key)
        return self.second[key] / self.num_values - mean[:, None] * mean

    def information(self, key: tuple[int, int]) -> list[torch.Tensor]:
        """Return the Fisher information of each layer's K, then of each layer's V. It is twice one token's share of the
        KL divergence of one next token."""
        group, block = key
        layers = list(self.grid.layers(group))
        return [x / self.num_gradients for f in (self.k_fisher, self.v_fisher) for x in f[layers, block]]

    @property
    def usual_costs(self) -> CellValues:
        """The mean squared gradient length of a token in K and V, ``(1, layers, heads)`` each."""
        diagonals = (f.diagonal(dim1=-2, dim2=-1) for f in (self.k_fisher, self.v_fisher))
        sums = (d.reshape(*d.shape[:2], self.grid.cell_heads, -1).sum(-1).flatten(1) for d in diagonals)
        return CellValues(*(x[None] / self.num_gradients for x in sums))

    @property
    def num_sinks(self) -> int:
        """The number of attention sinks at the start of a sequence."""
        usual = torch.cat(self.usual_costs).clamp_min(torch.finfo(torch.float64).tiny)
        ratios = (self.start_costs / self.num_draws / usual).flatten(1).mean(1)
        is_sink = (ratios > _SINK_COST).tolist()
        return is_sink.index(False) if False in is_sink else MOST_SINKS


def channels_of(values: CellValues, grid: CellGrid, group: int, block: int) -> torch.Tensor:
    """Return a cell's channels, ``(tokens, C)``: by tensor (K, then V), layer, head and dim."""
    return torch.cat([x.flatten(1) for x in values.cell(grid.layers(group), grid.heads(block))], dim=1)


def gather_window(
    model: KVModel,
    window: torch.Tensor,
    num_context: int,
    rope: Rope | None,
    moments: Moments,
    generator: torch.Generator,
    sample_tokens: int,
) -> None:
    """Add one window to ``moments``.

    Statistics are taken of the K and V of the first ``num_context`` tokens. The model's predictions on the tokens after
    them determine the costs. Keeps ``sample_tokens`` of the context. Raises ConfigError if the model overflows.
    """
    k, v = model.kv(window[:num_context])
    plain = CellValues(_turned(k.float(), rope, unrotate), v.float())
    moments.add_values(plain)
    leaves = CellValues(*(x.clone().requires_grad_(True) for x in plain))
    log_p = model.log_probabilities(_turned(leaves.k, rope, rotate), leaves.v, window[num_context:])
    if bool(log_p.isnan().any()):
        raise ConfigError(f"the model's log probabilities contain NaN in {model.model.dtype}")
    drawn = torch.multinomial(log_p.detach().exp().cpu(), _DRAWS, replacement=True, generator=generator)
    costs = [torch.zeros(x.shape[:3], device=x.device) for x in plain]
    for draw in range(_DRAWS):
        # Scores of different positions are uncorrelated, so one gradient of their sum serves all of them. The division
        # makes its square the mean over positions.
        score = log_p.gather(1, drawn[:, draw, None].to(log_p.device)).sum() / len(log_p) ** 0.5
        gradients = CellValues(*torch.autograd.grad(score, leaves, retain_graph=draw + 1 < _DRAWS))
        moments.add_gradients(gradients)
        for cost, gradient in zip(costs, gradients, strict=True):
            cost += gradient.square().sum(-1) / _DRAWS
    which = MOST_SINKS + torch.randperm(num_context - MOST_SINKS, generator=generator)[:sample_tokens]
    which = which.sort().values.to(k.device)
    halves = (x[which].clamp(-_HALF_LIMIT, _HALF_LIMIT).half().cpu() for x in plain)
    moments.samples.append(CostSample(CellValues(*halves), CellValues(*(x[which].cpu() for x in costs))))


def _turned(k: torch.Tensor, rope: Rope | None, turn: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Apply ``rotate`` or ``unrotate`` to the keys of a sequence's first tokens. Without a rope, return ``k``."""
    return k if rope is None else turn(k, rope.table(0, len(k), k.device), rope)
