"""How much a token's errors cost, told from its own keys and values.

Few tokens draw most of the attention that is paid to a context, and errors in them cost most: on a real language model
one token in a thousand costs a hundred times the mean. Which ones these are shows in their keys and values, so
calibration fits a linear model of the logarithm of the cost (`sgl_kvfetch.calibrate.sensitivity`). The encoder gives a
token whose errors cost n times the mean a step sqrt(n) times finer. Readers need the steps alone.
"""

from __future__ import annotations

import torch

# Coefficients are seen in standard deviations. Beyond so many they say no more: outliers would predict nonsense.
_MOST_DEVIATIONS = 8.0
_LEAST_NORM = 1e-6


def features(coefficients: torch.Tensor, spread: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return what tokens' costs are told from, float32 ``(tokens, C + heads)``.

    ``coefficients``: ``(tokens, C)``. ``spread``: ``(C,)``, their standard deviations. ``norms``: ``(tokens, heads)``,
    the lengths of the keys and values of each layer and head.
    """
    deviations = (coefficients / spread.clamp_min(_LEAST_NORM)).clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    return torch.cat((deviations, norms.clamp_min(_LEAST_NORM).log()), dim=1)


def log_cost(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of tokens' costs, ``(tokens,)``, 0 where a token costs the mean.

    ``weights``: one a feature, and a constant.
    """
    return features @ weights[:-1] + weights[-1]
