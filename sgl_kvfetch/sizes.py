"""Sizes and durations as users write them."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import ConfigError

UNITS = "kmgtp"
_TOO_MANY_BYTES = 1 << 63
_DURATIONS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?:(?P<unit>[kmgtp])(?P<binary>i)?)?(?P<bytes>b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a number of bytes. ``10GiB`` means powers of 1024, ``500MB`` powers of 1000, a bare number bytes.

    Raises ConfigError, also for ``10G``, which is ambiguous.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] and not match["bytes"]):
        raise ConfigError(f"invalid size {text!r}; expected a form such as 10GiB, 500MB or a number of bytes")
    power = UNITS.index(match["unit"].lower()) + 1 if match["unit"] else 0
    size = float(match["number"]) * (1024 if match["binary"] else 1000) ** power
    if not 1 <= size < _TOO_MANY_BYTES:
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise ConfigError(f"invalid size {shown!r}; expected at least one byte, and less than 8 EiB")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Format a size with three significant digits, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def parse_duration(text: str) -> float:
    """Return a time in seconds. Units are s, m (minutes), h and d. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"invalid duration {text!r}; expected a form such as 90s, 45m, 12h or 30d")
    return float(match[1]) * _DURATIONS_S[match[2]]
