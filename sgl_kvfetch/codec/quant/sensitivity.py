"""Predict how much errors in a token cost from the token's own keys and values.

A few tokens receive most of the attention to a context, and errors in them cost most: on a real language model, one
token in a thousand costs a hundred times the mean. Their keys and values reveal them, so calibration fits a linear
model of the logarithm of the cost (`fit_log_cost`). The encoder gives a token whose errors cost n times the mean a
step sqrt(n) times finer. Readers need only the steps.

A coefficient tells the cost by how many standard deviations it is off. One that hardly varies tells nothing: what moves
it is rounding, of values to bfloat16, and of products, which may add 5% of a step to a coefficient. In keys of Gemma 3,
which are normalised, some channels are always 0 once the rotation is undone; as shares of their deviation, rounding
would make them the largest features of all, and scales random. So no deviation counts as smaller than a step of 1, and
the fit gives features that vary less small weights.
"""

from __future__ import annotations

import torch

# Limit of a coefficient in the features, in standard deviations: outliers would lead to absurd predictions.
MOST_DEVIATIONS = 8.0
LEAST_SPREAD = 1.0  # of a coefficient: a step of 1
LEAST_NORM = 1e-6

# Weight of the ridge penalty, in units of the deviance. A smaller one overfits the calibration windows. Values from 0.5
# to 3 make no measurable difference.
_RIDGE = 1.0
_LEAST_DEVIATION = 0.1  # of a feature: the penalty keeps the weights of those that vary less small
_FIT_STEPS = 40
_MOST_LOG = 20.0


def features(coefficients: torch.Tensor, spread: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return the features that predict tokens' costs, float32 ``(tokens, C + heads)``.

    ``coefficients``: ``(tokens, C)``. ``spread``: ``(C,)``, their standard deviations, in steps of 1. ``norms``:
    ``(tokens, heads)``, the lengths of the keys and values of each layer and head.
    """
    deviations = (coefficients / spread.clamp_min(LEAST_SPREAD)).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
    return torch.cat((deviations, norms.clamp_min(LEAST_NORM).log()), dim=1)


def log_cost(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of tokens' costs, ``(tokens,)``; 0 is the mean cost.

    ``weights``: one a feature, and a constant.
    """
    return features @ weights[:-1] + weights[-1]


def fit_log_cost(features: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """Return the weights, float32 ``(features + 1,)``, of a log-linear model of ``costs``.

    It minimises E[cost / predicted + log predicted], the deviance of a Gamma distribution (McCullagh and Nelder,
    *Generalized Linear Models*, 1989, chapter 8). This is the right loss for choosing steps by the prediction: at fine
    steps the first term is the cost of the errors, and the second term is twice the bits, in nats.

    ``features``: float32 ``(tokens, n)``. ``costs``: float32 ``(tokens,)``, none negative.
    """
    centre, spread = features.mean(0), features.std(0).clamp_min(_LEAST_DEVIATION)
    x = (features - centre) / spread
    mean = costs.mean().clamp_min(torch.finfo(torch.float32).tiny)
    costs = costs / mean
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=_FIT_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def deviance() -> torch.Tensor:
        optimiser.zero_grad()
        log = x @ weights[:-1] + weights[-1]
        loss = (costs * (-log).clamp(-_MOST_LOG, _MOST_LOG).exp()).mean() + log.mean()
        loss = loss + _RIDGE * weights[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(deviance)  # type: ignore[no-untyped-call]
    fitted = weights.detach()
    slopes = fitted[:-1] / spread
    return torch.cat((slopes, (fitted[-1] - slopes @ centre)[None]))
