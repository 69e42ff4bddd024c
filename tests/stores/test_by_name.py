"""Lookups by the names of segments: what they find, and in how many round trips and requests."""

from __future__ import annotations

import asyncio

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.stores.base import lookup_by_name


class Bucket:
    """Counts requests, and the round trips that they come in."""

    def __init__(self, chain: list[bytes], *segments: tuple[int, int]) -> None:
        made = [make_segment(chain, first, length).manifest for first, length in segments]
        self.objects = {manifest.key.manifest_name: manifest.encode() for manifest in made}
        self.num_requests = self.num_rounds = 0
        self.fails_in_round = 0
        self._next: asyncio.Event | None = None

    async def get(self, name: str) -> bytes | None:
        self.num_requests += 1
        if self._next is None:
            self.num_rounds += 1
            self._next = asyncio.Event()
            asyncio.get_running_loop().call_later(0.001, self._answer)
        await self._next.wait()
        if self.num_rounds == self.fails_in_round:
            raise StoreError("server", "SlowDown", retriable=True)
        return self.objects.get(name)

    def _answer(self) -> None:
        assert self._next is not None
        self._next.set()
        self._next = None


async def test_a_prefix_takes_a_round_trip_for_each_segment() -> None:
    chain = page_hashes(28)
    segments = list(buddy_split(0, 28, 16))
    assert [length for _, length in segments] == [16, 8, 4]
    bucket = Bucket(chain, *segments)
    found = await lookup_by_name(bucket.get, FOLDER, chain)
    assert parts(found) == [(0, 16), (0, 8), (0, 4)]
    assert bucket.num_rounds == 3
    assert bucket.num_requests == 5 + 4 + 3  # lengths up to 16, 8 and 4
    bucket.num_rounds = bucket.num_requests = 0
    assert (await lookup_by_name(bucket.get, FOLDER, page_hashes(256, "another"))).hits == ()
    assert (bucket.num_rounds, bucket.num_requests) == (1, 9)


async def test_a_manifest_that_is_malformed_or_has_other_pages_is_not_used() -> None:
    chain, other = page_hashes(8), page_hashes(8, "another")
    moved = chain[:4] + [page_hashes(1, "x")[0]] * 4 + chain[4:]
    bucket = Bucket(chain, (0, 4))
    lying = make_segment(moved, 8, 4).manifest  # the pages of 4 to 8, said to be at 8
    bucket.objects[lying.key.manifest_name] = lying.encode()
    assert parts(await lookup_by_name(bucket.get, FOLDER, chain)) == [(0, 4)]
    for content in (b"", b"nonsense", make_segment(other, 0, 8).manifest.encode()):
        bucket = Bucket(chain, (0, 8), (0, 4))
        bucket.objects[make_segment(chain, 0, 8).manifest.key.manifest_name] = content
        assert parts(await lookup_by_name(bucket.get, FOLDER, chain)) == [(0, 4)]


async def test_a_failure_behind_the_first_segment_only_ends_the_run() -> None:
    chain = page_hashes(12)
    bucket = Bucket(chain, (0, 8), (8, 4))
    bucket.fails_in_round = 2
    assert parts(await lookup_by_name(bucket.get, FOLDER, chain)) == [(0, 8)]
    bucket.num_rounds, bucket.fails_in_round = 0, 1
    with pytest.raises(StoreError, match="SlowDown"):
        await lookup_by_name(bucket.get, FOLDER, chain)


async def test_a_run_ends_before_its_manifests_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = page_hashes(28)
    bucket = Bucket(chain, (0, 16), (16, 8), (24, 4))
    sizes = [len(content) for content in bucket.objects.values()]
    monkeypatch.setattr("sgl_kvfetch.stores.base.MAX_LOOKUP_ANSWER_BYTES", sum(sizes[:2]))
    assert parts(await lookup_by_name(bucket.get, FOLDER, chain)) == [(0, 16), (0, 8)]
