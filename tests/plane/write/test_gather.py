import torch
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.plane.write.gather import Gatherer, PageBatch, SpanPages
from tests.segments import page_hashes


def batch(first_page: int, num_pages: int, seed: str = "") -> PageBatch:
    """Make a batch in which each page's values are its position, so that tests detect mix-ups."""
    pages = torch.arange(first_page, first_page + num_pages).view(-1, 1, 1, 1, 1)
    return PageBatch(
        first_page, previous(first_page, seed), page_hashes(num_pages, seed, first_page), [RawPages(pages, -pages)]
    )


def previous(first_page: int, seed: str = "") -> bytes | None:
    return page_hashes(1, seed, first_page - 1)[0] if first_page else None


def shape(segments: list[PageBatch]) -> list[tuple[int, int]]:
    return [(s.first_page, len(s.page_hashes)) for s in segments]


def test_longest_segments_are_cut_at_once_and_the_rest_lingers() -> None:
    gatherer = Gatherer(max_pages=8, linger_s=1.0)
    assert shape(gatherer.add_batch(batch(0, 11), now_s=0.0)) == [(0, 8)]
    assert gatherer.due(now_s=0.9) == []
    assert shape(gatherer.add_batch(batch(11, 2), now_s=0.9)) == []
    assert gatherer.due(now_s=1.5) == []
    assert shape(gatherer.due(now_s=2.0)) == [(8, 4), (12, 1)]
    assert gatherer.due(now_s=9.0) == []


def test_sequences_do_not_mix() -> None:
    gatherer = Gatherer(max_pages=8, linger_s=1.0)
    gatherer.add_batch(batch(0, 4, "a"), now_s=0.0)
    gatherer.add_batch(batch(0, 4, "b"), now_s=0.0)
    joined = gatherer.add_batch(batch(4, 4, "b"), now_s=0.0)
    assert [s.page_hashes for s in joined] == [page_hashes(8, "b")]
    assert [s.page_hashes for s in gatherer.flush()] == [page_hashes(4, "a")]


@settings(deadline=None)
@given(start=st.integers(0, 70), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_batches_are_cut_like_the_whole_sequence(start: int, sizes: list[int]) -> None:
    """However it is split into batches. Spans come once each, as soon as they are whole, and segments have them as
    such, in order."""
    spans: list[SpanPages] = []
    gatherer = Gatherer(16, 1.0, 4, spans.extend)
    segments: list[PageBatch] = []
    page = start
    for size in sizes:
        segments += gatherer.add_batch(batch(page, size), now_s=0.0)
        page += size
        assert [span.first_page for span in spans] == list(range(-(-start // 4) * 4, page - 3, 4))
    segments += gatherer.flush()
    assert shape(segments) == list(buddy_split(start, page - start, 16))
    assert [span for segment in segments for span in segment.spans] == spans
    for segment in segments:
        pieces = [x for piece in segment.pieces for x in (piece.pieces if isinstance(piece, SpanPages) else (piece,))]
        values = torch.cat([piece.k for piece in pieces if isinstance(piece, RawPages)]).flatten().tolist()
        assert values == list(range(segment.first_page, segment.end_page))
        assert segment.previous_hash == previous(segment.first_page)
        assert segment.page_hashes == page_hashes(len(values), "", segment.first_page)
    assert gatherer.flush() == []
    for span in spans:
        assert span.previous_hash == previous(span.first_page)
        assert span.page_hashes == page_hashes(4, "", span.first_page)
