"""KVTC's bit allocation: chooses groups of coefficients, for the least squared error within a budget of bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from benchmarks.codec.baselines.kvtc.groups import KINDS, META_BITS, SIZES, Group, Kind, bits_of, dequantise, quantise

_VALUES_AT_ONCE = 1 << 20  # about as many as fit into a CPU's cache
_UNIT_BITS = gcd(META_BITS, *(bits_of(size, kind) for size in SIZES for kind in KINDS))


@dataclass(frozen=True, slots=True)
class Errors:
    """Squared errors, summed over the tokens of a sample.

    dropped: ``(coefficients,)``, each coefficient's error if it is not kept. grouped: for each size and kind,
    ``(coefficients - size + 1,)``, the error of the group that starts there. Float64.
    """

    dropped: np.ndarray
    grouped: Mapping[tuple[int, Kind], np.ndarray]


def measure_errors(sample: torch.Tensor) -> Errors:
    """Quantise every possible group. ``sample``: coefficients, float32 ``(tokens, coefficients)``."""
    num_coefficients = sample.shape[1]
    grouped = {
        (size, kind): _errors_of(sample, size, kind) for size in SIZES if size <= num_coefficients for kind in KINDS
    }
    return Errors(sample.double().square().sum(0).numpy(), grouped)


def _errors_of(sample: torch.Tensor, size: int, kind: Kind) -> np.ndarray:
    groups = sample.unfold(1, size, 1).transpose(0, 1)  # (starts, tokens, size)
    count = max(1, _VALUES_AT_ONCE // (len(sample) * size))
    found = []
    for start in range(0, len(groups), count):
        some = groups[start : start + count].contiguous()
        error = dequantise(*quantise(some, kind), kind) - some
        found.append(error.square().sum((1, 2), dtype=torch.float64))
    return torch.cat(found).numpy()


def allocate(errors: Errors, budgets: Sequence[int]) -> list[tuple[Group, ...]]:
    """Return the groups with the least error for each budget, in bits per token.

    This is dynamic programming. Coefficient i is dropped or the last one of a group, so the best result for the first
    i within b bits follows from results for fewer. One pass serves all budgets (appendix B.17).
    """
    num_coefficients = len(errors.dropped)
    most = max(budgets) // _UNIT_BITS
    options = [(size, kind, bits_of(size, kind) // _UNIT_BITS) for size, kind in errors.grouped]
    options = [option for option in options if option[2] <= most]
    best = np.zeros((max(SIZES) + 1, most + 1))  # a ring: row i % len(best) is for the first i coefficients
    chosen = np.zeros((num_coefficients + 1, most + 1), np.uint8)  # 0: dropped; else 1 + the index of the option
    for i in range(1, num_coefficients + 1):
        row, choice = best[i % len(best)], chosen[i]
        row[:] = best[(i - 1) % len(best)] + errors.dropped[i - 1]
        for index, (size, kind, cost) in enumerate(options, 1):
            if size > i:
                continue
            candidate = best[(i - size) % len(best), : most + 1 - cost] + errors.grouped[size, kind][i - size]
            better = candidate < row[cost:]
            np.copyto(row[cost:], candidate, where=better)
            choice[cost:][better] = index
    return [_groups(chosen, options, budget // _UNIT_BITS) for budget in budgets]


def _groups(chosen: np.ndarray, options: Sequence[tuple[int, Kind, int]], budget: int) -> tuple[Group, ...]:
    """Follow the choices backwards from the last coefficient."""
    found = []
    i = len(chosen) - 1
    while i > 0:
        index = int(chosen[i, budget])
        if index == 0:
            i -= 1
            continue
        size, kind, cost = options[index - 1]
        i -= size
        budget -= cost
        found.append(Group(i, size, kind))
    return tuple(reversed(found))
