"""Sizes, ages and ratios, as users read and write them."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.sizes import UNITS

_AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def format_size(num_bytes: int) -> str:
    """Format a size with three significant digits, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def format_age(seconds: float) -> str:
    """Format a time span in its largest unit that fits twice."""
    for unit, size_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def parse_age(text: str) -> float:
    """Return an age in seconds. Units are s, m (minutes), h and d. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"invalid age {text!r}; expected a form such as 90s, 45m, 12h or 30d")
    return float(match[1]) * _AGE_UNITS_S[match[2]]


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """Replace unprintable characters: stored text may hold anything, such as terminal escapes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
