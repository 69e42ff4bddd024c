"""Gather statistics of windows of text, a layer at a time: how K and V vary, and how much an error in them costs.

An error of K or V changes what the layer adds to the residual stream at the tokens that follow. Let J_i be the
derivative of that, at position i, by a token's K or V. A change of the stream costs about as much as it is large beside
the stream itself, whatever its direction, since the next layer norms the stream first. So with x_i for the stream
behind the layer, the KL divergence of the next tokens is about

    e^T W e / 2,    W = gain * mean over i of J_i^T J_i / |x_i|^2.

W is gathered without J: let r_i be normal with the standard deviation 1 / |x_i|, and g the gradient of sum r_i^T y_i,
where y_i is the layer's output. Then E[g g^T] is the sum of J_i^T J_i / |x_i|^2 (Hutchinson's estimator). One layer's
gradients are enough. With the attention of plain transformers written out, W of V is attention squared times the Gram
matrix of the output projection, and W of K is queries times queries, weighed by attention squared and by what the value
differs from the output.

The gain makes layers comparable. It is measured: noise is added to one layer's K or V, and what it costs at the model's
output is compared with what W foretells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec.calibrate.layers import KV, Layer, LayeredModel
from sgl_kvfetch.codec.calibrate.statistics import MOST_SINKS, Moments
from sgl_kvfetch.codec.calibrate.transform import transform_of
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.errors import ConfigError

_DRAWS = 4  # of directions of the stream; each is one backward pass through a layer
_TYPICAL_GAIN = 3.4  # of SmolLM2-135M
_NOISE_KL = 1e-4  # that noise in a layer's K or V should cost at most
_NOISE_WINDOWS, _NOISE_TOKENS = 2, 128
_ROWS_AT_ONCE = 64  # of distributions, which are as wide as the vocabulary


@dataclass
class _Noise:
    """A stream of hidden states behind noise in a layer's K (0) or V (1), ``(tokens, hidden)``; the KL divergence, in
    nats a token, that W foretells; the window."""

    tensor: int
    layer: int
    window: int
    foretold: float
    hidden: torch.Tensor


class Sweep:
    """Passes windows of text through a model once.

    ``fitted``: ``(tokens,)`` each, of which the first ``num_context`` are the context. They make ``moments``.
    ``held_out``: contexts. ``contexts`` gets their K and V, bfloat16 ``(tokens, layers, heads, dim)``.
    """

    def __init__(
        self,
        model: LayeredModel,
        fitted: Sequence[torch.Tensor],
        held_out: Sequence[torch.Tensor],
        num_context: int,
        rope: Rope | None,
        moments: Moments,
        seed: int = 0,
    ) -> None:
        self._model, self._rope, self.moments, self._num_context = model, rope, moments, num_context
        self._generator = torch.Generator().manual_seed(seed)
        num_following = len(fitted[0]) - num_context
        self._calls = model.calls(len(fitted[0]))
        self._context_calls = model.calls(num_context)
        self._following_calls = model.calls(num_following, num_context)
        self._num_noise = min(num_following, _NOISE_TOKENS)
        self._noise_calls = model.calls(self._num_noise, num_context)
        self._streams = [model.embed(window) for window in fitted]
        self._held_out = [model.embed(window[:num_context]) for window in held_out]
        self._noise: list[_Noise] = []
        self._group: list[list[CellValues]] = [[] for _ in fitted]  # K and V of the layer group that is under way
        shape = num_context, model.num_layers, model.num_heads
        dims = model.k_head_dim, model.v_head_dim
        self.contexts = [CellValues(*(torch.empty(*shape, d, dtype=torch.bfloat16) for d in dims)) for _ in held_out]

    def pass_layer(self, index: int) -> None:
        """Pass all windows through a layer. Layers come in order."""
        with self._model.layer(index) as layer:
            for i, hidden in enumerate(self._held_out):
                self._held_out[i], kv = layer.forward(hidden, self._context_calls)
                for whole, x in zip(self.contexts[i], kv, strict=True):
                    whole[:, index] = x
            noise_windows = [self._pass_window(layer, i) for i in range(len(self._streams))][:_NOISE_WINDOWS]
            for noise in self._noise:
                noise.hidden = self._without_gradients(layer, noise.hidden, noise_windows[noise.window][1])
            for i, (following, context) in enumerate(noise_windows):
                self._begin_noise(layer, i, following, context)
        grid = self.moments.grid
        group = index // grid.cell_layers
        if index == grid.layers(group)[-1]:
            for i, parts in enumerate(self._group):
                values = CellValues(*(torch.cat(x, dim=1) for x in zip(*parts, strict=True)))
                self.moments.add_values(group, i, values)
                parts.clear()

    def measure_gains(self) -> None:
        """Compare what noise costs at the output with what the weights foretell, and scale the weights accordingly."""
        foretold, found = torch.zeros(2, 2, self._model.num_layers, dtype=torch.float64)
        for window, stream in enumerate(self._streams[:_NOISE_WINDOWS]):
            of_window = [noise for noise in self._noise if noise.window == window]
            exact = stream[self._num_context :][: self._num_noise]
            for noise, kl in zip(
                of_window, divergences(self._model, exact, [n.hidden for n in of_window]), strict=True
            ):
                foretold[noise.tensor, noise.layer] += noise.foretold
                found[noise.tensor, noise.layer] += kl
        for tensor, gains in enumerate((found / foretold).tolist()):
            for layer, gain in enumerate(gains):
                self.moments.scale_costs(tensor, layer, gain)

    def _pass_window(self, layer: Layer, i: int) -> tuple[torch.Tensor, KV]:
        """Pass a window through a layer; return the layer's input behind the context, and the context's K and V."""
        hidden = self._streams[i]
        self._streams[i], kv = layer.forward(hidden, self._calls)
        context, following = KV(*(x[: self._num_context] for x in kv)), hidden[self._num_context :]
        plain = CellValues(_turned(context.k, self._rope, unrotate), context.v)
        self._group[i].append(CellValues(*(x[:, None].cpu() for x in plain)))
        stream = self._streams[i][self._num_context :]
        self.moments.add_gradients(layer.index, i, self._gradients(layer, following, plain, stream))
        return following, context

    def _gradients(
        self, layer: Layer, following: torch.Tensor, plain: CellValues, stream: torch.Tensor
    ) -> list[CellValues]:
        """Return gradients of random projections of what attention adds to ``stream``, with respect to K and V."""
        leaves = CellValues(*(x.clone().requires_grad_(True) for x in plain))
        past = KV(_turned(leaves.k, self._rope, rotate), leaves.v)
        output = layer.attention_after(following, self._following_calls, past)
        lengths = stream.norm(dim=-1, keepdim=True).to(output.device) * math.sqrt(len(output) / _TYPICAL_GAIN)
        draws = []
        for draw in range(_DRAWS):
            direction = torch.randn(output.shape, generator=self._generator).to(output.device) / lengths
            keep = draw + 1 < _DRAWS
            draws.append(CellValues(*torch.autograd.grad(output, leaves, direction, retain_graph=keep)))
        return draws

    def _begin_noise(self, layer: Layer, window: int, following: torch.Tensor, context: KV) -> None:
        """Begin streams behind noise in this layer's K, and in its V."""
        for tensor, x in enumerate(context):
            weights = self.moments.weights[tensor][layer.index] / self.moments.num_tokens
            e = self._noise_like_rounding(tensor, weights)
            noisy = [*context]
            noisy[tensor] = x + (_turned(e, self._rope, rotate) if tensor == 0 else e).to(x.device)
            hidden = self._without_gradients(layer, following[: self._num_noise], KV(*noisy))
            self._noise.append(_Noise(tensor, layer.index, window, self._foretold(e, weights), hidden))

    def _noise_like_rounding(self, tensor: int, weights: torch.Tensor) -> torch.Tensor:
        """Return errors of a layer's K or V, ``(tokens, heads, dim)``, as rounding the coefficients of a transform
        makes them: alike in all coefficients, but never larger than a coefficient itself.

        Without the latter they would be largest in directions that neither vary nor matter, where large errors matter.
        """
        x = torch.cat([parts[-1][tensor][MOST_SINKS:, 0] for parts in self._group]).double()
        x = x.reshape(len(x), *weights.shape[:2])
        x -= x.mean(0)
        transforms = [transform_of(x[:, i].T @ x[:, i] / len(x), [w]) for i, w in enumerate(weights)]
        variances = torch.stack([t.variances for t in transforms])
        num_tokens = self._num_context - MOST_SINKS
        levels = variances.flatten().sort().values  # the cost grows with the level; take the last that is not too high
        costs = torch.minimum(levels[:, None], levels).sum(1) * num_tokens / 2
        level = levels[max(0, int((costs <= _NOISE_KL).sum()) - 1)].clamp_min(torch.finfo(torch.float32).tiny)
        z = torch.randn(num_tokens, *variances.shape, generator=self._generator, dtype=torch.float64)
        z *= torch.minimum(variances, level).sqrt()
        e = torch.stack([z[:, i] @ t.inverse for i, t in enumerate(transforms)], dim=1).float()
        e = torch.cat((torch.zeros(MOST_SINKS, *e.shape[1:]), e))
        return e.reshape(self._num_context, self._model.num_heads, -1)

    @staticmethod
    def _foretold(e: torch.Tensor, weights: torch.Tensor) -> float:
        x = e.reshape(len(e), *weights.shape[:2]).double().cpu()
        return float(torch.einsum("tbi,bij,tbj->", x, weights, x)) / 2

    @torch.no_grad()
    def _without_gradients(self, layer: Layer, hidden: torch.Tensor, context: KV) -> torch.Tensor:
        return layer.after(hidden, self._noise_calls, context).cpu()


@torch.no_grad()
def divergences(model: LayeredModel, exact: torch.Tensor, others: Sequence[torch.Tensor]) -> list[float]:
    """Return the KL divergence, in nats a token, of the predictions from each of some outputs of the last layer."""
    totals = [0.0] * len(others)
    for first in range(0, len(exact), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        p = model.log_probabilities(exact[rows])
        for i, other in enumerate(others):
            totals[i] += float((p.exp() * (p - model.log_probabilities(other[rows]))).sum())
    if any(map(math.isnan, totals)):
        raise ConfigError("the model's log probabilities contain NaN; does the model overflow?")
    return [total / len(exact) for total in totals]


def _turned(k: torch.Tensor, rope: Rope | None, turn: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Apply ``rotate`` or ``unrotate`` to the keys of a sequence's first tokens. Without a rope, return ``k``."""
    return k if rope is None else turn(k, rope.table(0, len(k), k.device), rope)
