"""Joins what several folders have of a rank's heads into sources of its pages. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sgl_kvfetch.plane.fetch.plan import PageSource


def join_heads(heads: range, runs: Mapping[range, Sequence[PageSource]]) -> list[PageSource]:
    """Return the longest run of pages of which all ``heads`` are stored.

    ``runs``: for ranges of heads, sources of the pages from the first on, as many as are stored. Of ranges that are
    equally useful, the first is used. All heads are counted in the model.
    """
    pages: list[PageSource] = []
    for end in sorted({len(run) for run in runs.values()}):
        parts = [runs[each][len(pages) : end] for each in _cover(heads, [r for r in runs if len(runs[r]) >= end])]
        if not parts:
            break
        pages += [replace(first, others=tuple(others)) for first, *others in zip(*parts, strict=True)]
    return pages


def _cover(heads: range, ranges: Sequence[range]) -> list[range]:
    """Return the fewest of these ranges that have all ``heads``, in their order; none if some heads are missing."""
    cover: list[range] = []
    head = heads.start
    while head < heads.stop:
        reached = max((r for r in ranges if head in r), key=lambda r: min(r.stop, heads.stop), default=None)
        if reached is None:
            return []
        cover.append(reached)
        head = reached.stop
    return cover
