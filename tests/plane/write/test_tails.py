from __future__ import annotations

from itertools import permutations

import pytest

from sgl_kvfetch.codec import CodedSegment
from sgl_kvfetch.plane.write.tails import Tails
from tests.segments import SMALL, make_segment

SPAN = 8


def piece(first_page: int, num_pages: int, seed: str = "") -> CodedSegment:
    return make_segment(SMALL, num_pages, span_pages=SPAN, first_page=first_page, seed=seed)[0]


PIECES = piece(0, 4), piece(4, 2), piece(6, 2)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_span_is_whole_with_its_last_piece_in_any_order(order: tuple[int, ...]) -> None:
    tails = Tails(SPAN, 1 << 20)
    *first, last = (PIECES[i] for i in order)
    assert [tails.add(each) for each in first] == [[], []]
    assert tails.add(last) == list(PIECES)
    assert tails.add(last) == []  # the others are not held any longer


def test_conversations_do_not_mix() -> None:
    tails = Tails(SPAN, 1 << 20)
    tails.add(PIECES[0])
    assert tails.add(piece(4, 4, "other")) == []
    tails.add(PIECES[1])
    assert tails.add(PIECES[2]) == list(PIECES)


def test_the_oldest_go_when_there_is_no_room() -> None:
    tails = Tails(SPAN, sum(map(len, PIECES[0].contents)))
    assert tails.add(PIECES[0]) == []
    assert tails.add(piece(8, 1)) == []
    assert tails.add(PIECES[1]) == []
    assert tails.add(PIECES[2]) == []


def test_what_is_forgotten_is_not_joined() -> None:
    tails = Tails(SPAN, 1 << 20)
    tails.add(PIECES[0])
    tails.forget(PIECES[0].manifest.key)
    tails.forget(PIECES[1].manifest.key)  # it was never held
    assert tails.add(PIECES[1]) == []
    assert tails.add(PIECES[2]) == []
