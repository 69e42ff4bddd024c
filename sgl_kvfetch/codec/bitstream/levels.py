"""What manifests and quantisers say of levels, apart from their coder: a store has neither numpy nor torch."""

from __future__ import annotations

from typing import NamedTuple

LADDER, DIGITS = "ladder", "digits"  # the codecs of level 0, and of the others
MOST_LEVELS = 4


class Wide(NamedTuple):
    """A coefficient of two integers: ``low + high * 2**bits``. Those of all rows have their second integers behind
    all first ones, in order."""

    row: int
    bits: int
