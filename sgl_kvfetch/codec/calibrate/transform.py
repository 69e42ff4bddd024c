"""Derive a cell's transform from how its channels vary and what errors in them cost.

It is a Karhunen-Loeve transform that weighs errors by their cost. Let S be the covariance of the cell's channels and W
their weight: an error e costs e^T W e / 2. In coordinates z = W^(1/2) x an error's cost is half its squared length,
whatever its direction, so one uniform step serves all coordinates (Gersho and Gray, *Vector Quantization and Signal
Compression*, 1992, section 8.3). Rotating them to the eigenvectors of the covariance there, W^(1/2) S W^(1/2), keeps
the cost and minimises the sum of the entropies (Goyal, "Theoretical foundations of transform coding", 2001). So layers,
heads, channels and directions that hardly matter are coarsely quantised without further rules.

Only the blocks of W within one layer's K or V are used: measured over blocks as wide as a cell, weights overfit the few
windows they are measured on (docs/codec.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# The share of the weight that uses only the diagonal of what was measured: entries off the diagonal are known less
# well. From 0.1 to 0.7 makes little difference on text of the calibration's kind; on other text 0.3 saves 5%.
_DIAGONAL_SHARE = 0.3

# Directions that do not matter in this little text may matter elsewhere: no weight is below this share of the mean.
_FLOOR = 0.05

# No block weighs less than this share of the mean block: a block that the output does not depend on, such as a pruned
# head, still needs a transform.
_BLOCK_FLOOR = 1e-6


class Transform(NamedTuple):
    """The transform of a cell, all float64. ``inverse``: ``(C, C)``; row c is what one unit of coefficient c adds to
    the channels. ``weights``: the blocks of W, ``(n, n)`` each, along its diagonal. ``variances``: ``(C,)``, of the
    coefficients, in descending order."""

    inverse: torch.Tensor
    weights: list[torch.Tensor]
    variances: torch.Tensor


def transform_of(covariance: torch.Tensor, information: Sequence[torch.Tensor]) -> Transform:
    """Return the transform of a cell.

    With R the root of W and B the eigenvectors, the inverse transform (coefficients to channels) is B^T R^-1, and the
    forward transform is R B = W inverse^T. So only eigenvalues need to be inverted. An error of one unit in any
    coefficient costs KL = 1/2.

    ``covariance``: ``(C, C)`` float64. ``information``: float64 ``(n, n)``, blocks along the diagonal; their sizes sum
    to C.
    """
    weights = robust_weights(information)
    roots, inverse_roots = [], []
    for weight in weights:
        values, vectors = torch.linalg.eigh(weight)
        roots.append((vectors * values.sqrt()) @ vectors.T)
        inverse_roots.append((vectors / values.sqrt()) @ vectors.T)
    sizes = [len(weight) for weight in weights]
    rows = torch.cat([r @ part for r, part in zip(roots, torch.split(covariance, sizes), strict=True)])
    weighted = torch.cat([part @ r for r, part in zip(roots, torch.split(rows, sizes, dim=1), strict=True)], dim=1)
    variances, basis = torch.linalg.eigh((weighted + weighted.T) / 2)
    basis = basis.flip(1)
    inverse = torch.cat([part.T @ r for r, part in zip(inverse_roots, torch.split(basis, sizes), strict=True)], dim=1)
    return Transform(inverse, weights, variances.flip(0).clamp_min(0))


def robust_weights(information: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the information made robust: every direction has a minimum weight, and the diagonal counts for more."""
    means = [block.diagonal().mean() for block in information]
    least = _BLOCK_FLOOR * torch.stack(means).mean()
    weights = []
    for block, mean in zip(information, means, strict=True):
        diagonal = _DIAGONAL_SHARE * block.diagonal() + _FLOOR * mean.clamp_min(least)
        weights.append((1 - _DIAGONAL_SHARE) * block + torch.diag(diagonal))
    return weights
