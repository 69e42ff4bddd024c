"""The background encoder on real stores, while others write, delete, encode and die."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from harness.small_segments import expiring
from harness.waiting import LoopClock, until
from sgl_kvfetch.codec import Content
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError, StoreErrorReason
from sgl_kvfetch.keys import DATA_SUFFIX, FORMAT_MAJOR, FORMAT_MINOR
from sgl_kvfetch.plane.write.writer import commit_segment, delete_segment
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.tools import encoder as encoder_module
from sgl_kvfetch.tools.encoder import EncodeOptions, Encoder, Garbage, Tally, Target, make_targets, transcode
from tests.segments import as_newer, make_segment, names
from tests.tools.test_transcode import decoded_equal

HEVC = make_targets(["hevc"], ["240p"])
BOTH = make_targets(["hevc"], ["240p", "480p"])
ORPHAN_AGE_S = 900.0


class Meddler(LocalStore):
    """A store that lets a test act as another client at a chosen moment."""

    before_replace: Callable[[], object] | None = None
    evicted: tuple[str, ...] = ()  # names that are gone when the first data object is read
    num_puts = 0
    garbles = ""  # a name whose bytes come back wrong
    garbles_puts = False  # the last object put comes back wrong
    keeps = ""  # a name that cannot be deleted
    is_down = False
    num_refused = 0
    calls_left = 0  # the last of these calls is not answered
    unanswered: asyncio.Event | None = None

    async def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0 and self.unanswered is not None:
            self.unanswered.set()
            await asyncio.Event().wait()

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        await self._count()
        if self.before_replace is not None:
            await self.before_replace()  # type: ignore[misc]
        return await super().replace(name, data, expected_digest)

    async def put(self, name: str, data: Content) -> None:
        await self._count()
        await super().put(name, data)
        self.num_puts += 1
        if self.garbles_puts:
            self.garbles = name

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        await self._count()
        if self.is_down:
            self.num_refused += 1
            raise StoreError("refused", "as told", retriable=True)
        for evicted in self.evicted if name.endswith(DATA_SUFFIX) else ():
            (self.root / evicted).unlink(missing_ok=True)
        data = await super().get(name, start, length)
        return data if data is None or name != self.garbles else bytes([data[0] ^ 1]) + data[1:]

    async def delete_unnamed(self, name: str) -> bool:
        await self._count()
        if name == self.keeps:
            raise StoreError("io", "as told")
        return await super().delete_unnamed(name)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Meddler]:
    store = Meddler(tmp_path / "store", orphan_age_s=ORPHAN_AGE_S)
    yield store
    await store.close()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[HttpStore]:
    async with running_server(ServerConfig(tmp_path / "store", port=0, grace_s=1)) as server:
        store = HttpStore(server.url)
        yield store
        await store.close()


def segments(count: int) -> list[CodedSegment]:
    return [make_segment(num_pages=2, seed=f"segment {i}")[0] for i in range(count)]


async def stored_in(store: AdminStore, count: int = 1) -> list[CodedSegment]:
    made = segments(count)
    for segment in made:
        await commit_segment(store, segment)
    return made


async def encode(store: AdminStore, targets: tuple[Target, ...] = HEVC, **options: Any) -> Tally:
    """Run an encoder once, completely."""
    encoder = Encoder(store, EncodeOptions(targets, **({"grace_s": 0, "workers": 2} | options)))
    try:
        await encoder.run_once()
    finally:
        await encoder.close()
    return encoder.tally


async def manifest_of(store: AdminStore, segment: CodedSegment) -> Manifest:
    content = await store.get(segment.manifest.key.manifest_name)
    assert content is not None
    return decode_manifest(content)


def ways(manifest: Manifest) -> list[Target]:
    return [Target(v.codec, v.resolution) for v in manifest.variants]


async def require_readable(store: AdminStore, segment: CodedSegment) -> Manifest:
    """Decode all variants of a segment, and compare them with what was stored. Return its manifest."""
    manifest = await manifest_of(store, segment)
    first, *more = [await store.get(manifest.data_name(variant)) or b"" for variant in manifest.variants]
    for variant in range(len(manifest.variants)):
        assert decoded_equal(CodedSegment(manifest, first, tuple(more)), variant, segment, 0)
    return manifest


async def require_encoded(store: AdminStore, segment: CodedSegment, targets: tuple[Target, ...] = HEVC) -> None:
    assert ways(await require_readable(store, segment)) == list(targets)


async def require_nothing_loose(store: AdminStore, *stored: CodedSegment) -> None:
    manifests = [await manifest_of(store, segment) for segment in stored]
    expected = {m.key.manifest_name for m in manifests}.union(*(m.data_names for m in manifests))
    assert await names(store) == expected


async def until_encoded(encoder: Encoder, count: int) -> None:
    await until(lambda: encoder.tally.num_encoded >= count)


async def test_what_a_newer_version_wrote_stays_as_it_is(local: Meddler) -> None:
    """To write its manifest again would drop what only that version knows."""
    (segment,) = await stored_in(local)
    name, newer = segment.manifest.key.manifest_name, as_newer(segment.manifest.encode())
    await local.put(name, newer)
    tally = await encode(local)
    assert f"version {FORMAT_MAJOR}.{FORMAT_MINOR + 1}" in tally.failures[name]
    assert await local.get(name) == newer
    assert await names(local) == {name, segment.data_name}


@pytest.mark.process
async def test_encodes_segments_to_the_wanted_variants(http: HttpStore) -> None:
    stored = segments(3)
    stored[0] = expiring(stored[0], time.time() + 3600)
    for segment in stored:
        await commit_segment(http, segment)
    tally = await encode(http, BOTH)
    assert (tally.num_encoded, tally.num_done, tally.failures) == (3, 0, {})
    assert tally.raw_bytes == sum(s.manifest.raw_bytes for s in stored)
    assert tally.before_bytes == sum(len(s.data) + len(s.manifest.encode()) for s in stored)
    assert tally.after_bytes == sum([info.size_bytes async for info in http.list()])
    assert (tally.num_deleted, tally.deleted_bytes) == (3, sum(len(s.data) for s in stored))
    for segment in stored:
        await require_encoded(http, segment, BOTH)
        assert (await manifest_of(http, segment)).expires == segment.manifest.expires
        (hit,) = (await http.lookup(segment.manifest.key.namespace, segment.manifest.page_hashes)).hits
        assert decode_manifest(hit.manifest) == await manifest_of(http, segment)
    await require_nothing_loose(http, *stored)


async def test_only_what_is_missing_is_encoded_and_what_is_not_wanted_goes(local: Meddler) -> None:
    (segment,) = await stored_in(local)
    await encode(local, keep_source=True)
    manifest = await manifest_of(local, segment)
    assert ways(manifest) == [*HEVC, Target("zstd", "240p")]
    assert manifest.data_name(manifest.variants[1]) == segment.data_name
    assert (await encode(local, keep_source=True)).num_encoded == 0

    local.num_puts = 0
    await encode(local, make_targets(["zstd"], ["240p"]), keep_source=True)  # it must come first
    assert ways(await manifest_of(local, segment)) == [Target("zstd", "240p"), *HEVC]
    assert local.num_puts == 0  # the manifest is replaced
    targets = make_targets(["hevc", "deflate"], ["240p"])
    await encode(local, targets)
    assert local.num_puts == 1
    assert (await manifest_of(local, segment)).variants[0] == manifest.variants[0]
    await require_encoded(local, segment, targets)
    await encode(local)
    assert local.num_puts == 1
    await require_encoded(local, segment)
    await require_nothing_loose(local, segment)


async def test_replaced_data_is_kept_for_the_grace_period(local: Meddler, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock()
    monkeypatch.setattr(encoder_module, "Garbage", partial(Garbage, clock=clock))
    (segment,) = await stored_in(local)
    encoder = Encoder(local, EncodeOptions(HEVC, grace_s=600))
    running = asyncio.create_task(encoder.run_once())
    await until_encoded(encoder, 1)
    await clock.advance(500)
    await encoder.garbage.delete_due()
    assert await local.get(segment.data_name) == segment.data
    await clock.advance(100)
    await running
    await encoder.close()
    assert await local.get(segment.data_name) is None


async def test_orphan_age_of_replaced_data_starts_at_the_replacement(local: Meddler) -> None:
    def age() -> None:
        then_s = time.time() - 2 * ORPHAN_AGE_S
        for path in local.root.rglob("*.kv?"):
            os.utime(path, (then_s, then_s))

    (segment,) = await stored_in(local)
    age()
    encoder = Encoder(local, EncodeOptions(HEVC, grace_s=60))
    await encoder.run_round()
    await encoder.close()
    await local.collect()
    assert await local.get(segment.data_name) == segment.data
    age()
    await local.collect()
    assert await local.get(segment.data_name) is None
    await require_encoded(local, segment)


async def test_segments_that_are_deleted_and_evicted_during_encoding_stay_so(local: Meddler) -> None:
    deleted, evicted, stays = await stored_in(local, 3)
    local.evicted = (evicted.manifest.key.manifest_name, evicted.data_name)  # after its manifest is read
    local.before_replace = lambda: delete_segment(local, deleted.manifest)
    tally = await encode(local)
    assert (tally.num_encoded, tally.num_changed, tally.failures) == (1, 2, {})
    await require_encoded(local, stays)
    left = {name for name in await names(local) if stays.manifest.key.stem not in name}
    assert all(name.endswith(".kvd") for name in left)  # the store collects those, by their age
    assert (await local.lookup(deleted.manifest.key.namespace, deleted.manifest.page_hashes)).hits == ()


async def test_a_segment_replaced_by_another_process_is_left_alone(local: Meddler) -> None:
    (segment,) = await stored_in(local)
    theirs = transcode(segment.manifest, segment.data, make_targets(["hevc"], ["1080p", "240p"]))

    async def replace_it() -> None:
        local.before_replace = None
        await commit_segment(local, theirs)

    local.before_replace = replace_it
    encoder = Encoder(local, EncodeOptions(HEVC, grace_s=0))
    await encoder.run_round()
    assert encoder.tally.num_changed == 1
    assert await manifest_of(local, segment) == theirs.manifest
    await encoder.run_once()  # now it is known
    await encoder.close()
    await require_encoded(local, segment)
    await require_nothing_loose(local, segment)


@pytest.mark.parametrize("wrong", ["new data", "a variant", "checksums"])
async def test_a_manifest_is_not_replaced_where_data_are_not_what_it_says(local: Meddler, wrong: str) -> None:
    (segment,) = await stored_in(local)
    if wrong == "new data":
        local.garbles_puts = True
    elif wrong == "a variant":
        await encode(local, keep_source=True)
        manifest = await manifest_of(local, segment)
        local.garbles = manifest.data_name(manifest.variants[0])
    else:
        variant = segment.manifest.variants[0]
        chunks = (msgspec.structs.replace(variant.chunks[0], decoded_checksum=bytes(16)), *variant.chunks[1:])
        other = msgspec.structs.replace(variant, chunks=chunks, resolution="1080p")
        lying = msgspec.structs.replace(segment.manifest, variants=(variant, other))
        await commit_segment(local, CodedSegment(lying, segment.data, (segment.data,)))
    before = await manifest_of(local, segment)
    failures = (await encode(local)).failures
    assert "checksum" in failures[segment.manifest.key.manifest_name]
    assert await manifest_of(local, segment) == before
    assert await local.get(segment.data_name) == segment.data


async def test_an_encoder_that_dies_at_any_step_loses_nothing(local: Meddler) -> None:
    """It has no state but the store's: segments stay readable, and the next encoder finds what is left to do."""
    (segment,) = await stored_in(local)
    orphan = segments(2)[1]  # without a manifest: nobody's here
    await local.put(orphan.data_name, orphan.data)
    died_after: list[list[Target]] = []  # how the segment was stored then
    for num_calls in itertools.count(1):
        local.calls_left, local.unanswered = num_calls, asyncio.Event()
        encoding, dying = (asyncio.create_task(each) for each in (encode(local, BOTH), local.unanswered.wait()))
        await asyncio.wait((encoding, dying), return_when=asyncio.FIRST_COMPLETED)
        is_over, local.unanswered = encoding.done(), None
        for task in (encoding, dying):
            task.cancel()
        await asyncio.gather(encoding, dying, return_exceptions=True)
        if is_over:
            break
        died_after.append(ways(await require_readable(local, segment)))
    assert len(died_after) > 6
    assert died_after[-1] == list(BOTH) != died_after[-2]
    await encode(local, BOTH)
    await require_encoded(local, segment, BOTH)
    assert await local.delete(orphan.data_name)
    await require_nothing_loose(local, segment)


async def test_watch_encodes_new_segments_and_survives_an_outage(local: Meddler) -> None:
    first, second = segments(2)
    await commit_segment(local, first)
    encoder = Encoder(local, EncodeOptions(HEVC, grace_s=0))
    watching = asyncio.create_task(encoder.watch(0.02))
    await until_encoded(encoder, 1)
    local.is_down = True
    await commit_segment(local, second)
    await until(lambda: local.num_refused >= 3)
    assert not watching.done()
    local.is_down = False
    await until_encoded(encoder, 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await encoder.close()
    assert encoder.tally.failures == {}
    for segment in (first, second):
        await require_encoded(local, segment)


@pytest.mark.parametrize(("call", "reason"), [("get", "unauthorised"), ("require_replace", "invalid")])
async def test_a_store_that_lets_nobody_encode_ends_the_encoder_and_is_left_alone(
    local: Meddler, monkeypatch: pytest.MonkeyPatch, call: str, reason: StoreErrorReason
) -> None:
    await stored_in(local)
    before = await names(local)
    monkeypatch.setattr(local, call, AsyncMock(side_effect=StoreError(reason, "as told")))
    encoder = Encoder(local, EncodeOptions(HEVC))
    for run in (encoder.run_once, lambda: encoder.watch(0.01)):
        with pytest.raises(StoreError, match="as told"):
            await run()
    await encoder.close()
    assert await names(local) == before


async def test_data_that_is_named_again_or_younger_than_the_manifest_is_kept(local: Meddler) -> None:
    """An encoder may need longer than the grace period to read back the data that it put."""
    (segment,) = await stored_in(local)
    made = transcode(segment.manifest, segment.data, HEVC)
    ((name, data),) = made.data_objects()
    await local.put(name, data)
    manifest = await local.head(segment.manifest.key.manifest_name)
    assert manifest is not None
    manifest_s = manifest.modified_s

    async def is_deleted(age_s: float) -> bool:
        """Whether data are that are so much older than the manifest."""
        os.utime(local.root / name, (manifest_s - age_s,) * 2)
        garbage = Garbage(local, grace_s=0)
        garbage.record_unnamed([name])
        await garbage.delete_due()
        assert len(garbage) == 0
        return await local.head(name) is None

    assert not await is_deleted(-5)
    assert await is_deleted(5)
    await commit_segment(local, made)
    assert not await is_deleted(5)


async def test_a_failed_deletion_does_not_block_others(local: Meddler) -> None:
    now = 0.0
    first, second = await stored_in(local, 2)
    garbage = Garbage(local, 10, clock=lambda: now)
    for segment in (first, second):
        await commit_segment(local, transcode(segment.manifest, segment.data, HEVC))
        garbage.record_unnamed([segment.data_name])
    local.keeps, now = first.data_name, 10.0
    with pytest.raises(StoreError, match="as told"):
        await garbage.delete_due()
    await garbage.delete_due()
    assert await local.head(second.data_name) is None
    assert await local.head(first.data_name) is not None
    assert (len(garbage), garbage.due_in_s) == (1, 10)
