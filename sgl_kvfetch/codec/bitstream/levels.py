"""Names and types of levels, for manifests and quantisers. The coder is in `ladder`: it needs numpy and torch, which a
store does not have."""

from __future__ import annotations

from typing import NamedTuple

LADDER, DIGITS = "ladder", "digits"  # the codecs of level 0 and of the other levels
MOST_LEVELS = 4


class Wide(NamedTuple):
    """A coefficient of two integers: ``low + high * 2**bits``. The second integers of all rows come after all first
    ones, in the order of the rows."""

    row: int
    bits: int
