"""Formatting of sizes and ratios for users."""

from __future__ import annotations

from sgl_kvfetch.sizes import UNITS


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


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """Replace unprintable characters: stored text may hold anything, such as terminal escapes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
