"""Percentiles, and means with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """All fields are None if nothing was measured. Percentiles are interpolated between the two nearest values."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


def distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution()
    return Distribution(float(np.mean(values)), *np.percentile(values, (50, 95, 99)).tolist())


# Student's t, 97.5%, by degrees of freedom from 1.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """``margin``: half the mean's 95% confidence interval, by Student's t; None if there was only one value."""

    mean: float
    margin: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.margin is None else (self.mean - self.margin, self.mean + self.margin)

    def show(self, form: str, margin_form: str | None = None) -> str:
        """Return the mean, and the margin unless it rounds to 0."""
        margin = "" if self.margin is None else f"{self.margin:{margin_form or form}}"
        return f"{self.mean:{form}}{f' ± {margin}' if margin.strip('+-0.e%') else ''}"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean. Assumes independent values."""
    mean, degrees = statistics.fmean(values), len(values) - 1
    if not degrees:
        return Estimate(mean, None)
    t = _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.45 / degrees
    return Estimate(mean, t * statistics.stdev(values) / math.sqrt(len(values)))
