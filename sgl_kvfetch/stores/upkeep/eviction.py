"""The order in which a store that is full deletes segments."""

from __future__ import annotations

from typing import NamedTuple


class EvictionRank(NamedTuple):
    """Segments are deleted by ascending rank: expired ones first, pinned ones after all others, and among equals those
    that were used longest ago."""

    live: bool  # not expired
    pinned: bool
    last_used: float


_, *_COLUMNS = EvictionRank._fields
LIVE_RANK_SQL = ", ".join(_COLUMNS)  # to sort segments that have not expired, in a table with these columns
