"""Measures how a model's predictions change if it continues from restored KV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.methods import KV_DTYPE, Method

_ROWS_AT_ONCE = 64  # bounds the memory for distributions in float64
# Student's t, 97.5%, by degrees of freedom from 1.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True)
class Estimate:
    """A mean of independent values. ``margin``: half its 95% confidence interval, by Student's t; None if there was
    only one value."""

    mean: float
    margin: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        mean, degrees = statistics.fmean(values), len(values) - 1
        if not degrees:
            return cls(mean, None)
        t = _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.45 / degrees
        return cls(mean, t * statistics.stdev(values) / math.sqrt(len(values)))

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.margin is None else (self.mean - self.margin, self.mean + self.margin)

    def show(self, form: str, margin_form: str | None = None) -> str:
        """Return the mean, and the margin unless it rounds to 0."""
        margin = "" if self.margin is None else f"{self.margin:{margin_form or form}}"
        return f"{self.mean:{form}}{f' ± {margin}' if margin.strip('+-0.e%') else ''}"


@dataclass(frozen=True)
class Sample:
    """One method on one window: means over the continuation's tokens.

    ``kl``: nats, from the distribution after exact KV to the one after restored KV. ``dnll``: additional nats per
    token, compared with exact KV. ``top1``: share of tokens with equal top predictions.
    """

    bits_per_value: float
    kl: float
    dnll: float
    top1: float


@dataclass(frozen=True)
class Row:
    """One method over all windows."""

    name: str
    samples: Sequence[Sample]
    bits_per_value: Estimate
    kl: Estimate
    dnll: Estimate
    top1: Estimate


def measure(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    context_tokens: int,
    methods: Sequence[Method],
    on_step: Callable[[str], None] = lambda name: None,
) -> tuple[Estimate, list[Row]]:
    """Encode and restore the KV of each window's context with each method, and let the model continue from it. Return
    the negative log likelihood after exact KV, and a row a method.

    ``windows``: ``(context_tokens + continuation + 1,)`` ids. The reference is the model's KV of the context, rounded
    to bfloat16, so a lossless method has a KL of 0. ``on_step`` gets the name of each method before it runs on a
    window.
    """
    samples: dict[str, list[Sample]] = {method.name: [] for method in methods}
    nlls = []
    for ids in windows:
        context, continuation, following = ids[:context_tokens], ids[context_tokens:-1], ids[context_tokens + 1 :]
        k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(context))
        exact = _continue(model, k, v, continuation)
        reference, exact_nll = _Reference(exact), _nll(exact, following)
        nlls.append(exact_nll)
        for method in methods:
            on_step(method.name)
            coded = method.code(k, v)
            restored = _continue(model, coded.k, coded.v, continuation)
            top1 = float((exact.argmax(1) == restored.argmax(1)).double().mean())
            change = _nll(restored, following) - exact_nll
            samples[method.name].append(Sample(coded.bits_per_value, reference.kl(restored), change, top1))
    return Estimate.of(nlls), [_row(name, found) for name, found in samples.items()]


@torch.no_grad()
def _continue(model: KVModel, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return model.log_probabilities(k, v, ids).cpu()


def _nll(log_probabilities: torch.Tensor, following: torch.Tensor) -> float:
    return float(-log_probabilities.gather(1, following[:, None]).double().mean())


class _Reference:
    """Log probabilities ``(tokens, vocabulary)`` that others are compared with: by far most of the time of a benchmark
    goes there if a vocabulary is large, so what all comparisons need is computed once."""

    def __init__(self, exact: torch.Tensor) -> None:
        self._probabilities = exact.double().exp_()
        self._negative_entropy = self._mean(exact)

    def kl(self, others: torch.Tensor) -> float:
        """Return the divergence of others from these, in nats per token."""
        return self._negative_entropy - self._mean(others)

    def _mean(self, log_probabilities: torch.Tensor) -> float:
        pairs = zip(*(torch.split(x, _ROWS_AT_ONCE) for x in (self._probabilities, log_probabilities)), strict=True)
        return sum(float(p.flatten() @ q.double().flatten()) for p, q in pairs) / len(log_probabilities)


def _row(name: str, samples: Sequence[Sample]) -> Row:
    columns = zip(*((x.bits_per_value, x.kl, x.dnll, x.top1) for x in samples), strict=True)
    return Row(name, samples, *map(Estimate.of, columns))
