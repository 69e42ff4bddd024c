"""Compares stored pages, as they are restored, with what the engine has computed of them.

The quantiser judges (`Quantiser.error_ratios`): what it should change itself, and what sums in another order may
change, is 1. What is computed behind a cut hit is computed from restored values, whose errors grow in a few layers and
tokens to a hundred times of what is usual there, and mean nothing. So

* the median token counts, of the mean of all layers, but no more than four times the quarter of layers with the least
  errors. One token may become a sink of attention or not, as its sums were rounded, and then all tokens behind it
  differ, from some layer on, as much as those of other weights. Faults are in the first layers, too;
* a layer counts by its median token, and an eighth of that;
* what is lost may be no more than a share of how tokens vary, a bound that no profile moves: a profile comes from the
  store, as values do, and says itself how large errors are to be;
* the model's first layer has no such errors, since it depends on the tokens alone. So what is stored of it is compared
  with what is coded again (`Quantiser.repeat_ratios`), by its median token and a sixth of its worst one. It shows one
  token that is not restored, which the others do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec import CellValues, Quantiser
from sgl_kvfetch.codec.quant.base import ratio as ratio_of, sums_noise
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.protocol import cell_places
from sgl_kvfetch.types import TENSORS, TensorName

_OF_A_LAYER, _OF_A_TOKEN = 8.0, 6.0  # how much larger the ratio of a layer, or of a token of the first layer, may be
_BLOCK_TOKENS = 16  # half of which must be off before they count by themselves
_OF_A_BLOCK = 25.0  # how much larger the ratio of a block of one layer may be
_OF_OTHERS = 2.0  # how much nearer to another one a block must be: at the most, 4, eight times in squares
_OF_PRODUCTS, _OF_SUMS = 1e-4, 10.0  # distances that count, in values' squares, and in what sums may change of them
_MOST_DISTANCES = 1 << 20  # in memory
_OF_A_QUARTER = 4.0  # how much larger the ratio of all layers may be than that of the quarter with the least errors
# What counts as 1, as a share of how tokens vary. Of SmolLM2, `klt` loses 0.02 of K and 0.04 of V at its default, and
# 0.3 and 0.8 at its coarsest step; without what tokens differ by, 0.5 and 1 are lost.
_MOST_LOST: dict[TensorName, float] = {"k": 0.11, "v": 0.21}
_LEAST_VARYING, _LEAST_VARIATION = 16, 0.5  # tokens, and how much of V varies, as a share of its square


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of an audit: ratios of errors to those that are expected. ``ratio``: where it is largest. ``typical``:
    of all layers, which varies little from audit to audit."""

    ratio: float
    where: str
    typical: float


def compare(
    computed: CellValues,
    restored: CellValues,
    quantiser: Quantiser,
    heads: HeadSlice,
    tokens: range,
    coarser: float = 1.0,
) -> Compared:
    """Compare a rank's values, ``(tokens, layers, heads, dim)``. ``tokens``: in the sequence. ``coarser``: as in
    `Quantiser.error_ratios`."""
    found: list[torch.Tensor] = []
    ratios: dict[str, float] = {}

    def add(where: str, ratio: float) -> None:
        ratios[where] = max(ratios.get(where, 0.0), ratio)

    again = CellValues(*map(torch.empty_like, computed))
    num_blocks = max(1, len(tokens) // _BLOCK_TOKENS)
    blocks = torch.zeros((len(TENSORS), computed.k.shape[1], num_blocks))  # the largest of all cells' ratios
    for layers, head_block, place in cell_places(quantiser, heads, tokens):
        own, stored = (x.cell(layers, head_block) for x in (computed, restored))
        found.append(quantiser.error_ratios(own, stored, place, coarser))
        of_blocks = _block_medians(found[-1], num_blocks)
        blocks[:, layers.start : layers.stop] = blocks[:, layers.start : layers.stop].maximum(of_blocks)
        of_layers = (found[-1].median(2).values / _OF_A_LAYER).maximum(of_blocks.amax(2) / _OF_A_BLOCK)
        for tensor, ratios_of_tensor in zip(TENSORS, of_layers.tolist(), strict=True):
            for layer, ratio in zip(place.layers, ratios_of_tensor, strict=True):
                add(f"{tensor.upper()} of layer {layer}", ratio)
        if coarser == 1:
            coded = quantiser.dequantise(quantiser.quantise(own, place), own.k.dtype, place)
            for whole, x in zip(again.cell(layers, head_block), coded, strict=True):
                whole.copy_(x)
            if not place.layers[0]:
                for tensor, of_tensor in zip(TENSORS, quantiser.repeat_ratios(own, stored, place), strict=True):
                    ratio = max(of_tensor[0].median().item(), of_tensor[0].max().item() / _OF_A_TOKEN)
                    add(f"{tensor.upper()} of the first layer", ratio)
    for tensor, share in _lost_shares(computed, restored).items():
        add(f"{tensor.upper()}, relative to how it varies", share / _MOST_LOST[tensor])
    each = torch.cat([x.flatten(0, 1) for x in found])
    typical = each.mean(0).median().item()
    quarter = each.kthvalue(-(-len(each) // 4), 0).values.median().item()
    add("all layers", min(typical, _OF_A_QUARTER * quarter))
    if coarser == 1:
        for tensor, x, y, found_of_blocks in zip(TENSORS, again, restored, blocks, strict=True):
            for what, ratio in _mix_ups(x, y, num_blocks):
                add(
                    f"{what} of {tensor.upper()} that are others'",
                    (ratio / _OF_OTHERS).minimum(found_of_blocks).max().item(),
                )
    where = max(ratios, key=lambda each: ratios[each])
    return Compared(ratios[where], where, typical)


def _lost_shares(computed: CellValues, restored: CellValues) -> dict[TensorName, float]:
    """Return the squared error of the median token as a share of its distance from the mean of all, in the median
    layer. Where all that tokens differ by is lost, it is 1. Nothing is returned of few tokens, nor of those that are
    much alike, as in a run of blanks: beside what they differ by, sound errors are large."""
    own = CellValues(*(x.float() for x in computed))
    varies = CellValues(*(_median_square(x - x.mean(0)) for x in own))
    if len(own.v) < _LEAST_VARYING or not (varies.v / _median_square(own.v)).nanmedian() >= _LEAST_VARIATION:
        return {}
    errors = (_median_square(x - y.float()) for x, y in zip(own, restored, strict=True))
    return {t: ratio_of(*x).median().item() for t, *x in zip(TENSORS, errors, varies, strict=True)}


def _median_square(x: torch.Tensor) -> torch.Tensor:
    """Return the squared length of the median token in each layer. ``x``: ``(tokens, layers, heads, dim)``."""
    return x.square().sum((2, 3)).median(0).values


def _block_medians(x: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the medians of ``(..., tokens)`` over blocks of tokens, ``(..., blocks)``."""
    return torch.stack([block.median(-1).values for block in x.tensor_split(num_blocks, -1)], -1)


def _mix_ups(expected: torch.Tensor, restored: torch.Tensor, num_blocks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield by how much restored values are nearer to those of another token, head or layer than to their own: the
    ratio of squared distances, ``(layers, blocks)``. The values are ``(tokens, layers, heads, dim)``.

    What sums or a quantiser change of values points nowhere, so it brings them no nearer to others, unless these are
    much alike."""
    # Dimensions of what may be confused come third, and those that are compared as one vector last.
    tokens, heads, layers = (1, 4, 0, 2, 3), (0, 1, 2, 4, 3), (0, 4, 1, 2, 3)
    for what, order in ("tokens", tokens), ("heads", heads), ("layers", layers):
        x, y = (z.float().unsqueeze(4).permute(order).flatten(3) for z in (expected, restored))
        if (count := x.shape[2]) > 1:
            noise = sums_noise(expected.dtype)
            at_once = max(1, _MOST_DISTANCES // count**2)
            of_x, of_y = (torch.split(z.flatten(0, 1), at_once) for z in (x, y))
            ratios = torch.cat([_nearer_to_others(a, b, noise) for a, b in zip(of_x, of_y, strict=True)])
            ratios = ratios.view(x.shape[:3])
            worst = ratios.amax(2) if what == "heads" else ratios[:, 0]
            yield what, _block_medians(worst if what == "tokens" else worst.T, num_blocks)


def _nearer_to_others(expected: torch.Tensor, restored: torch.Tensor, noise: float) -> torch.Tensor:
    """Return the squared distance of each of ``restored``, ``(batch, count, dim)``, from the same one of ``expected``,
    as a multiple of that from the nearest other one, ``(batch, count)``. Distances count as none if they are small
    beside what products tell from 0, or beside ``noise``: what sums may change, as a share of values' squares."""
    middle = expected.mean(1, keepdim=True)
    x, y = expected - middle, restored - middle
    squares, of_restored = x.square().sum(2), y.square().sum(2)
    own = (x - y).square().sum(2)
    others = of_restored[:, :, None] + squares[:, None] - 2 * y @ x.transpose(1, 2)
    others.diagonal(dim1=1, dim2=2).fill_(math.inf)
    of_products = _OF_PRODUCTS * torch.maximum(squares, of_restored)
    least = torch.maximum(of_products, _OF_SUMS * noise * expected.square().sum(2))
    return torch.where(own > least, own / others.amin(2).maximum(of_products), 0.0)
