from __future__ import annotations

import pytest
import xxhash

from sgl_kvfetch.codec.container.objects import Pieces, bytes_of, views_of

PARTS: list[bytes | memoryview] = [b"abc", b"", memoryview(b"defg"), b"h"]
WHOLE = b"abcdefgh"


def test_pieces_are_one_content() -> None:
    pieces = Pieces(PARTS)
    assert len(pieces) == len(WHOLE)
    assert pieces.joined() == bytes_of(pieces) == b"".join(views_of(pieces)) == WHOLE
    assert pieces.hexdigest() == xxhash.xxh3_128_hexdigest(WHOLE)
    assert bytes_of(WHOLE) is WHOLE
    (view,) = views_of(WHOLE)
    assert view == WHOLE


@pytest.mark.parametrize("start", [None, *range(-2, 10)])
@pytest.mark.parametrize("end", [None, *range(-2, 10)])
def test_slices_are_those_of_the_whole(start: int | None, end: int | None) -> None:
    assert Pieces(PARTS)[start:end] == WHOLE[start:end]
