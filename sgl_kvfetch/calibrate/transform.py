"""From moments to a transform: the Karhunen-Loeve transform where errors count by what they cost.

Let S be the covariance of a block's channels and F their Fisher information. In coordinates z = F^(1/2) x an error's
cost is its squared length, whatever its direction, so one uniform step serves all coordinates (Gersho and Gray, *Vector
Quantization and Signal Compression*, 1992, section 8.3); and rotating them to the eigenvectors of the covariance there,
F^(1/2) S F^(1/2), costs nothing and makes the entropies' sum smallest (Goyal, "Theoretical foundations of transform
coding", 2001). A layer, a head, a channel or a direction that hardly matters is thereby coarsely quantised of itself.
"""

from __future__ import annotations

from typing import Literal

import torch

# How much each channel's error counts: as the whole Fisher matrix says, its diagonal, its mean over a layer's block, or
# alike in the whole model. All but the first are there to measure what each step brings.
Weights = Literal["matrix", "channel", "layer", "none"]

# Directions that this little text does not need may matter elsewhere: no direction counts less than so much of the
# mean. From 0.3% to 10% make no difference in bits on the reference model.
_FLOOR = 0.03

# Nor does any block count less than so much of the mean block: one that the output does not depend on at all, a pruned
# head say, still needs a transform.
_BLOCK_FLOOR = 1e-6


def inverse_transform(
    covariance: torch.Tensor, information: torch.Tensor, *, weights: Weights = "matrix", decorrelate: bool = True
) -> torch.Tensor:
    """``(layers, blocks, C, C)`` float64: row c is what one unit of coefficient c adds to the channels.

    An error of one unit in any coefficient costs KL = 1/2. Rows go by falling variance of their coefficients.
    ``covariance``, ``information``: ``(layers, blocks, C, C)`` float64.
    """
    weight = _weight(information, weights)
    values, vectors = torch.linalg.eigh(weight)
    root = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
    inverse_root = (vectors / values.sqrt()[..., None, :]) @ vectors.mT
    weighted = root @ covariance @ root
    if decorrelate:
        basis = torch.linalg.eigh(weighted).eigenvectors.flip(-1)
    else:
        order = weighted.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True)
        basis = torch.eye(weight.shape[-1], dtype=weight.dtype)[order].mT
    inverse: torch.Tensor = (inverse_root @ basis).mT.contiguous()
    return inverse


def _weight(information: torch.Tensor, weights: Weights) -> torch.Tensor:
    diagonal = information.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True).clamp_min(_BLOCK_FLOOR * diagonal.mean())
    if weights == "matrix":
        return information + torch.diag_embed((_FLOOR * mean).expand_as(diagonal))
    if weights == "channel":
        return torch.diag_embed(diagonal + _FLOOR * mean)
    return torch.diag_embed((mean if weights == "layer" else diagonal.mean()).expand_as(diagonal))
