from __future__ import annotations

from typing import cast

import pytest

from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.plane.fetch.finder import join_heads
from sgl_kvfetch.plane.fetch.plan import PageSource


def joined(heads: range, runs: dict[range, int]) -> list[list[tuple[range, int]]]:
    """For each page, the ranges that it is read from. ``runs``: how many pages there are of each range."""
    ranges = {cast(SegmentReader, each): each for each in runs}  # stands for its reader
    given = {each: [PageSource(cast(SegmentReader, each), page) for page in range(n)] for each, n in runs.items()}
    return [
        [(ranges[part.reader], part.page) for part in (source, *source.others)] for source in join_heads(heads, given)
    ]


OWN, WHOLE, LEFT, RIGHT = range(4, 8), range(8), range(4, 6), range(6, 8)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({}, []),
        ({OWN: 0, WHOLE: 0}, []),
        ({OWN: 2, WHOLE: 2}, [[OWN]] * 2),
        ({OWN: 0, WHOLE: 2}, [[WHOLE]] * 2),
        ({OWN: 1, WHOLE: 3}, [[OWN], [WHOLE], [WHOLE]]),
        ({OWN: 0, LEFT: 3, RIGHT: 2}, [[LEFT, RIGHT]] * 2),
        ({OWN: 1, LEFT: 3, RIGHT: 2}, [[OWN], [LEFT, RIGHT]]),
        ({OWN: 0, LEFT: 3}, []),
        ({OWN: 0, LEFT: 2, WHOLE: 1, RIGHT: 3}, [[WHOLE], [LEFT, RIGHT]]),
        ({OWN: 0, range(3, 6): 1, range(6, 9): 1}, [[range(3, 6), range(6, 9)]]),  # another TP size of 12 heads
    ],
)
def test_a_page_is_found_where_all_of_its_heads_are(runs: dict[range, int], expected: list[list[range]]) -> None:
    assert joined(OWN, runs) == [[(each, page) for each in ranges] for page, ranges in enumerate(expected)]
