"""Sizes as users write them."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import ConfigError

UNITS = "kmgtp"
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?:(?P<unit>[kmgtp])(?P<binary>i)?)?(?P<bytes>b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a number of bytes. ``10GiB`` means powers of 1024, ``500MB`` powers of 1000, a bare number bytes.

    Raises ConfigError, also for ``10G``, which is ambiguous.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] and not match["bytes"]):
        raise ConfigError(f"invalid size {text!r}; expected a form such as 10GiB, 500MB or a number of bytes")
    power = UNITS.index(match["unit"].lower()) + 1 if match["unit"] else 0
    size = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
    if size < 1:
        raise ConfigError(f"invalid size {text!r}; expected at least one byte")
    return size
