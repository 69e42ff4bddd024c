"""Measure what a profile's steps cost and save: the KL divergence of predictions after a restored context, and bits.

A window is a context, of which K and V are known, and a continuation. Its tokens pass the model ten times: after the
exact context, after the context as each of eight steps restores it, and after one that is forgotten, in which every
token but the sinks is the mean of all. The ten differ only in the K and V that attention finds. So they pass a layer
one after the other while it is loaded, and the model is read once, not ten times. All layers have errors at once, as on
a server, and hidden states carry them on.

The predictions p after the exact context, and q after another, give the cost: the mean of KL(p || q) over tokens and
windows. That of the forgotten context is what the context is worth to the model; the default ``target_kl`` is a share
of it.

What a step costs differs by the kind of text, several times. So each kind is measured by itself, and the curve has the
cost of the worst of the kinds that count, at each step: a target takes a step that keeps it in all of them. What the
context is worth is the mean over windows of these kinds.

Layers that a profile is not of, such as those with states, find what they kept of the exact context, as on a server.

Steps are kept as far as the cost grows with them. That of the finest ones may be lost in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import structs

from sgl_kvfetch.codec.calibrate.layers import KV, Exact, LayeredModel
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import MeasuredKind, MeasuredStep, Profile
from sgl_kvfetch.errors import ConfigError

_ROWS_AT_ONCE = 64  # of distributions, which are as wide as the vocabulary
_STEPS = tuple(2.0 ** (1.5 * i - 5) for i in range(8))

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Wraps a loop to report its progress. Arguments: the steps, their number, and the name of the work."""


class HeldOut(NamedTuple):
    """A context, as layers have kept it, and the tokens that follow it. ``coded``: K and V of the layers that a profile
    is of, bfloat16 ``(tokens, layers, heads, dim)``. ``others``: what stays exact, by the layer's number. ``kind``: of
    its text."""

    coded: CellValues
    others: Mapping[int, Exact]
    continuation: torch.Tensor
    kind: str


def silent(steps: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    """Report no progress."""
    return steps


def placeholder() -> tuple[MeasuredStep, ...]:
    """Return a curve for a profile that has not been measured."""
    return MeasuredStep(_STEPS[0], _STEPS[0], 8.0), MeasuredStep(_STEPS[-1], _STEPS[-1], 0.0)


def measure_contexts(
    model: LayeredModel,
    profile: Profile,
    contexts: Sequence[HeldOut],
    num_windows: Mapping[str, int],
    worst_of: Collection[str] = (),
    progress: Progress = silent,
) -> Profile:
    """Return the profile with its curve, the KL divergence and entropy at each step, and with the value of the context
    to the model (``context_kl``), each also by kind of text.

    ``num_windows``: of the whole calibration, by kind. ``worst_of``: the kinds that count; all if it is empty.
    Raises ConfigError for a KL divergence that does not grow.
    """
    calls = model.calls(len(contexts[0].continuation), len(contexts[0].coded.k))
    # Of each continuation: after the exact context, after that of each step, after one that is forgotten.
    streams = [[model.embed(context.continuation)] * (len(_STEPS) + 2) for context in contexts]
    bits = [0.0] * len(_STEPS)
    grid = profile.grid
    coded = {number: index for index, number in enumerate(profile.layers.coded)}
    restored: list[list[CellValues]] = []
    for number in progress(range(model.num_layers), model.num_layers, "accuracy"):
        within = coded[number] % grid.cell_layers if number in coded else 0
        if number in coded and within == 0:
            group = coded[number] // grid.cell_layers
            restored = _group_restored([each.coded for each in contexts], group, profile, bits)
        with model.layer(number) as layer, torch.no_grad():
            for which, of_window in enumerate(streams):
                for i, hidden in enumerate(of_window):
                    past = contexts[which].others.get(number)
                    if number in coded:
                        k, v = (x[:, within] for x in restored[which][i])
                        past = KV(k, v, past if isinstance(past, torch.Tensor) else None)
                    assert not isinstance(past, torch.Tensor)
                    of_window[i] = layer.after(hidden, calls, past).cpu()
    costs = [_divergences(model, exact, others) for exact, *others in streams]
    num_values = sum(x.numel() for x in contexts[0].coded) * len(contexts)
    kinds = _by_kind([context.kind for context in contexts], costs, num_windows, worst_of)
    counting = [cost for context, cost in zip(contexts, costs, strict=True) if not worst_of or context.kind in worst_of]
    worst = [max(kind.kls[i] for kind in kinds if kind.counts) for i in range(len(_STEPS))]
    context_kl = sum(cost[-1] for cost in counting) / len(counting)
    curve = [MeasuredStep(step, kl, b / num_values) for step, kl, b in zip(_STEPS, worst, bits, strict=True)]
    rising = [i for i, kl in enumerate(worst) if kl > max((0.0, *worst[:i]))]
    if len(rising) < 2 or context_kl <= 0:
        raise ConfigError("the KL divergence does not grow with the step: is the model trained?")
    return replace(
        profile,
        curve=tuple(curve[i] for i in rising),
        context_kl=context_kl,
        kinds=tuple(structs.replace(kind, kls=tuple(kind.kls[i] for i in rising)) for kind in kinds),
    )


def _by_kind(
    names: Sequence[str],
    costs: Sequence[Sequence[float]],
    num_windows: Mapping[str, int],
    worst_of: Collection[str],
) -> list[MeasuredKind]:
    """Return the means over each kind's windows. ``names``, ``costs``: of each window, as `_divergences` gives them."""
    kinds = []
    for name in dict.fromkeys(names):
        of_kind = [cost for each, cost in zip(names, costs, strict=True) if each == name]
        *kls, context_kl = (max(0.0, sum(kl) / len(kl)) for kl in zip(*of_kind, strict=True))
        counts = not worst_of or name in worst_of
        kinds.append(MeasuredKind(name, num_windows[name], len(of_kind), counts, context_kl, tuple(kls)))
    return kinds


@torch.no_grad()
def _divergences(model: LayeredModel, exact: torch.Tensor, others: Sequence[torch.Tensor]) -> list[float]:
    """Return the KL divergence, in nats per token, of the predictions from each of some outputs of the last layer."""
    totals = [0.0] * len(others)
    for first in range(0, len(exact), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        p = model.log_probabilities(exact[rows])
        for i, other in enumerate(others):
            totals[i] += float((p.exp() * (p - model.log_probabilities(other[rows]))).sum())
    if any(map(math.isnan, totals)):
        raise ConfigError("the model's log probabilities contain NaN; does the model overflow?")
    return [total / len(exact) for total in totals]


def _group_restored(
    contexts: Sequence[CellValues], group: int, profile: Profile, bits: list[float]
) -> list[list[CellValues]]:
    """Return each context's K and V in a layer group, as `_context_restored` does."""
    # A quantiser keeps matrices for each cell it has met. Those of eight steps and all layer groups would need more
    # memory than all else, so each group has quantisers of its own.
    quantisers = [KltQuantiser(profile, step=step) for step in _STEPS]
    return [_context_restored(context, group, quantisers, bits) for context in contexts]


def _context_restored(
    context: CellValues, group: int, quantisers: Sequence[KltQuantiser], bits: list[float]
) -> list[CellValues]:
    """Return a layer group's K and V: as they are, restored from each step, and with all tokens but the sinks replaced
    by the mean. Add the entropy of the integers and exponents to ``bits``, and the size of exact tokens."""
    profile = quantisers[0].profile
    grid = profile.grid
    exact = context.cell(grid.layers(group), range(grid.num_heads))
    restored = [CellValues(*(x.clone() for x in exact)) for _ in range(len(quantisers) + 1)]
    for block in range(grid.num_head_blocks):
        place = CellPlace(grid.layers(group), grid.heads(block), range(len(context.k)))
        cell = context.cell(place.layers, place.heads)
        for i, quantiser in enumerate(quantisers):
            quantised = quantiser.quantise(cell, place)
            exponents, exact_bytes, integers = quantised
            bits[i] += _entropy_bits(exponents[None]) + 8 * exact_bytes.numel() + _entropy_bits(integers)
            _put(restored[i], block, grid.cell_heads, quantiser.dequantise(quantised, cell.k.dtype, place), 0)
        mean = quantisers[-1].mean_values(place, cell.k.dtype)
        _put(restored[-1], block, grid.cell_heads, mean, profile.num_sinks)
    return [exact, *restored]


def _put(group: CellValues, block: int, cell_heads: int, cell: CellValues, first_token: int) -> None:
    for whole, part in zip(group, cell, strict=True):
        whole[first_token:, :, block * cell_heads : (block + 1) * cell_heads] = part[first_token:]


def _entropy_bits(integers: torch.Tensor) -> float:
    """Return the order-0 entropy of uint8 ``(coefficients, tokens)``, in bits. Each coefficient has its own
    distribution."""
    x = integers.long()
    num_coefficients, num_tokens = x.shape
    cells = torch.bincount((x + 256 * torch.arange(num_coefficients)[:, None]).flatten())
    p = cells[cells > 0].double() / num_tokens
    return float(-(p * p.log2()).sum() * num_tokens)
