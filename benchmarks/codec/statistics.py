"""Means over windows, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        margin = "" if self.margin is None else f" ±{self.margin:{margin_form or form}}"
        return f"{self.mean:{form}}{margin}"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean. Assumes independent values: windows do not overlap."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean, _t(count - 1) * deviation / math.sqrt(count))


def _t(degrees: int) -> float:
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.45 / degrees
