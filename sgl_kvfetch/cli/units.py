"""Parsing and formatting of sizes and ratios for users."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import ConfigError

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?:(?P<unit>[kmgtp])(?P<binary>i)?)?(?P<bytes>b)?", re.IGNORECASE)
_UNITS = "kmgtp"


def parse_size(text: str) -> int:
    """Return a number of bytes. ``10GiB`` means powers of 1024, ``500MB`` powers of 1000, a bare number bytes.

    Raises ConfigError, also for ``10G``, which is ambiguous.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] and not match["bytes"]):
        raise ConfigError(f"invalid size {text!r}; expected a form such as 10GiB, 500MB or a number of bytes")
    power = _UNITS.index(match["unit"].lower()) + 1 if match["unit"] else 0
    size = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
    if size < 1:
        raise ConfigError(f"invalid size {text!r}; expected at least one byte")
    return size


def format_size(num_bytes: int) -> str:
    """Format a size with three significant digits, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """Replace unprintable characters: stored text may hold anything, such as terminal escapes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
