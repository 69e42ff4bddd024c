"""Sizes and ratios as people write and read them."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import ConfigError

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?:(?P<unit>[kmgtp])(?P<binary>i)?)?(?P<bytes>b)?", re.IGNORECASE)
_UNITS = "kmgtp"


def parse_size(text: str) -> int:
    """Bytes. ``10GiB`` counts in powers of 1024, ``500MB`` in powers of 1000, a bare number in bytes.

    Raises ConfigError, also for ``10G``: people mean either.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] and not match["bytes"]):
        raise ConfigError(f"size {text!r} is not understood; write it as 10GiB, 500MB or a number of bytes")
    power = _UNITS.index(match["unit"].lower()) + 1 if match["unit"] else 0
    size = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
    if size < 1:
        raise ConfigError(f"size {text!r} is less than a byte")
    return size


def format_size(num_bytes: int) -> str:
    """Three digits or so, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """Stored text may hold anything, terminal escapes too."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
