"""Predict how much errors in a token cost from the token's own keys and values.

A few tokens receive most of the attention to a context, and errors in them cost most: on a real language model, one
token in a thousand costs a hundred times the mean. Their keys and values reveal them, so calibration fits a linear
model of the logarithm of the cost (`calibrate.sensitivity`). The encoder gives a token whose errors cost
n times the mean a step sqrt(n) times finer. Readers need only the steps.
"""

from __future__ import annotations

import torch

# Limit of a coefficient in the features, in standard deviations: outliers would lead to absurd predictions.
_MOST_DEVIATIONS = 8.0
_LEAST_NORM = 1e-6


def features(coefficients: torch.Tensor, spread: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return the features that predict tokens' costs, float32 ``(tokens, C + heads)``.

    ``coefficients``: ``(tokens, C)``. ``spread``: ``(C,)``, their standard deviations. ``norms``: ``(tokens, heads)``,
    the lengths of the keys and values of each layer and head.
    """
    deviations = (coefficients / spread.clamp_min(_LEAST_NORM)).clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    return torch.cat((deviations, norms.clamp_min(_LEAST_NORM).log()), dim=1)


def log_cost(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of tokens' costs, ``(tokens,)``; 0 is the mean cost.

    ``weights``: one a feature, and a constant.
    """
    return features @ weights[:-1] + weights[-1]
