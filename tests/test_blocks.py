import gc

import pytest

from sgl_kvfetch import blocks


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_kept", [])


def test_a_block_is_used_again_when_nothing_refers_to_it() -> None:
    first = blocks.empty((3, 1 << 20))
    view, address = first[1:], first.data_ptr()
    del first
    gc.collect()
    assert blocks.empty((3 << 20,)).data_ptr() != address  # a view refers to it
    del view
    gc.collect()
    assert blocks.empty((1 << 20, 3)).data_ptr() == address


def test_few_freed_bytes_are_kept_until_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MOST_KEPT_BYTES", 10 << 20)
    held = [blocks.empty((4 << 20,)) for _ in range(5)]
    del held
    gc.collect()
    assert sum(map(len, blocks._kept)) == 8 << 20
    assert len(blocks._take(1 << 20)) == 1 << 20  # they are more than twice as large
    assert len(blocks._take(2 << 20)) == 4 << 20
    assert len(blocks._take(64 << 20)) == 64 << 20  # none is that large
    assert blocks._kept
    blocks.drop_kept()
    assert not blocks._kept
