"""Pins: what is left to see beside `test_life`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.stores.notes import Pin, decode_pin, put_pin
from tests.directory.conftest import rebuild
from tests.stores.conformance import failing

CHAINS = [page_hashes(16, branch=str(i)) for i in range(8)]
SEGMENTS = [make_segment(chain, 0, 16) for chain in CHAINS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


@pytest.mark.parametrize("content", [b"", b"nonsense", Pin("", 1, b"x" * 33).encode(), Pin("", 0, b"x" * 32).encode()])
def test_malformed_pins_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError, match="malformed pin"):
        decode_pin(content)


@pytest.mark.usefixtures("tiny_stores")
async def test_a_merged_segment_is_pinned_like_its_halves(tmp_path: Path) -> None:
    """Also when the catalog is made anew, where files that are no pins are skipped."""
    store = LocalStore(tmp_path, capacity_bytes=int(4.5 * SIZE), min_free_bytes=0)
    halves = [make_segment(CHAINS[0], first, 8) for first in (0, 8)]
    for segment in halves:
        await put_segment(store, segment)
    await put_pin(store, Pin("", 1, b"".join(CHAINS[0])))
    await put_segment(store, SEGMENTS[0])
    for segment in halves:
        await store.delete(segment.manifest.key.manifest_name)
    for number in range(2):
        for segment in SEGMENTS[1:]:
            await put_segment(store, segment)
        assert parts(await store.lookup(FOLDER, CHAINS[0])) == [(0, 16)], number
        for name in ("0", "0" * 64):
            (tmp_path / ".pins" / name).write_bytes(b"not a pin")
        await rebuild(store)
    await put_pin(store, Pin("", 1, b"".join(CHAINS[6])))
    with failing("full", "pinned segments would take"):  # more than half of the capacity
        await put_pin(store, Pin("", 1, b"".join(CHAINS[7])))
    await store.close()
