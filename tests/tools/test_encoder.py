"""The background encoder on real stores, while others write, delete, encode and die."""

from __future__ import annotations

import asyncio
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
from sgl_kvfetch.stores.base import AdminStore, object_digest
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.tools import encoder as encoder_module
from sgl_kvfetch.tools.encoder import EncodeOptions, Encoder, Garbage, Target, make_targets, transcode
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

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        if self.before_replace is not None:
            await self.before_replace()  # type: ignore[misc]
        return await super().replace(name, data, expected_digest)

    async def put(self, name: str, data: Content) -> None:
        await super().put(name, data)
        self.num_puts += 1
        if self.garbles_puts:
            self.garbles = name

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        for evicted in self.evicted if name.endswith(DATA_SUFFIX) else ():
            (self.root / evicted).unlink(missing_ok=True)
        data = await super().get(name, start, length)
        return data if data is None or name != self.garbles else bytes([data[0] ^ 1]) + data[1:]


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Meddler]:
    store = Meddler(tmp_path / "store", orphan_age_s=ORPHAN_AGE_S)
    yield store
    await store.close()


@pytest.fixture(params=["local", "http"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminStore]:
    if request.param == "local":
        local = LocalStore(tmp_path / "store")
        yield local
        await local.close()
        return
    async with running_server(ServerConfig(tmp_path / "store", port=0, grace_s=1)) as server:
        http = HttpStore(server.url)
        yield http
        await http.close()


def segments(count: int) -> list[CodedSegment]:
    return [make_segment(num_pages=2, seed=f"segment {i}")[0] for i in range(count)]


async def stored_in(store: AdminStore, count: int = 1) -> list[CodedSegment]:
    made = segments(count)
    for segment in made:
        await commit_segment(store, segment)
    return made


async def encode(store: AdminStore, targets: tuple[Target, ...] = HEVC, **options: Any) -> Encoder:
    """Run an encoder once, completely."""
    encoder = Encoder(store, EncodeOptions(targets, **({"grace_s": 0, "workers": 2} | options)))
    try:
        await encoder.run_once()
    finally:
        await encoder.close()
    return encoder


async def manifest_of(store: AdminStore, segment: CodedSegment) -> Manifest:
    content = await store.get(segment.manifest.key.manifest_name)
    assert content is not None
    return decode_manifest(content)


async def read(store: AdminStore, manifest: Manifest) -> CodedSegment:
    contents = [await store.get(manifest.data_name(variant)) for variant in manifest.variants]
    assert all(contents)
    return CodedSegment(manifest, contents[0], tuple(contents[1:]))  # type: ignore[arg-type]


def ways(manifest: Manifest) -> list[Target]:
    return [Target(v.codec, v.resolution) for v in manifest.variants]


async def require_encoded(store: AdminStore, segment: CodedSegment, targets: tuple[Target, ...] = HEVC) -> None:
    found = await read(store, await manifest_of(store, segment))
    assert ways(found.manifest) == list(targets)
    for variant in range(len(targets)):
        assert decoded_equal(found, variant, segment, 0)


async def require_nothing_loose(store: AdminStore, *manifests: Manifest) -> None:
    expected = {m.key.manifest_name for m in manifests}.union(*(m.data_names for m in manifests))
    assert await names(store) == expected


async def until_encoded(encoder: Encoder, count: int) -> None:
    await until(lambda: encoder.tally.num_encoded >= count)


async def test_what_a_newer_version_wrote_stays_as_it_is(local: Meddler) -> None:
    """To write its manifest again would drop what only that version knows."""
    (segment,) = segments(1)
    name, newer = segment.manifest.key.manifest_name, as_newer(segment.manifest.encode())
    await local.put(segment.data_name, segment.data)
    await local.put(name, newer)
    tally = (await encode(local)).tally
    assert f"version {FORMAT_MAJOR}.{FORMAT_MINOR + 1}" in tally.failures[name]
    assert await local.get(name) == newer
    assert await names(local) == {name, segment.data_name}


@pytest.mark.process
async def test_encodes_segments_to_the_wanted_variants(store: AdminStore) -> None:
    stored = segments(3)
    stored[0] = expiring(stored[0], time.time() + 3600)
    for segment in stored:
        await commit_segment(store, segment)
    tally = (await encode(store, BOTH)).tally
    assert (tally.num_encoded, tally.num_done, tally.failures) == (3, 0, {})
    assert tally.raw_bytes == sum(s.manifest.raw_bytes for s in stored)
    assert tally.before_bytes == sum(len(s.data) + len(s.manifest.encode()) for s in stored)
    assert (tally.num_deleted, tally.deleted_bytes) == (3, sum(len(s.data) for s in stored))
    for segment in stored:
        await require_encoded(store, segment, BOTH)
        assert (await manifest_of(store, segment)).expires == segment.manifest.expires
        key = segment.manifest.key
        (hit,) = (await store.lookup(key.namespace, segment.manifest.page_hashes)).hits
        assert decode_manifest(hit.manifest) == await manifest_of(store, segment)
    manifests = [await manifest_of(store, segment) for segment in stored]
    assert tally.after_bytes == sum([info.size_bytes async for info in store.list()])
    await require_nothing_loose(store, *manifests)


async def test_only_what_is_missing_is_encoded_and_what_is_not_wanted_goes(local: Meddler) -> None:
    (segment,) = await stored_in(local)
    await encode(local, keep_source=True)
    manifest = await manifest_of(local, segment)
    assert ways(manifest) == [*HEVC, Target("zstd", "240p")]
    assert manifest.data_name(manifest.variants[1]) == segment.data_name
    assert (await encode(local, keep_source=True)).tally.num_encoded == 0
    await require_nothing_loose(local, manifest)

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
    await require_nothing_loose(local, await manifest_of(local, segment))


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


async def test_orphan_age_of_replaced_data_starts_at_the_replacement(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, orphan_age_s=ORPHAN_AGE_S)

    def age() -> None:
        then_s = time.time() - 2 * ORPHAN_AGE_S
        for path in tmp_path.rglob("*.kv?"):
            os.utime(path, (then_s, then_s))

    (segment,) = await stored_in(store)
    age()
    encoder = Encoder(store, EncodeOptions(HEVC, grace_s=60))
    await encoder.run_round()
    await encoder.close()
    await store.collect()
    assert await store.get(segment.data_name) == segment.data
    age()
    await store.collect()
    assert await store.get(segment.data_name) is None
    await require_encoded(store, segment)
    await store.close()


@pytest.mark.process
async def test_two_concurrent_encoders(store: AdminStore) -> None:
    stored = await stored_in(store, 4)
    tallies = [e.tally for e in await asyncio.gather(*(encode(store, grace_s=0.5) for _ in range(2)))]
    assert all(tally.failures == {} for tally in tallies)
    assert sum(tally.num_encoded for tally in tallies) >= 4
    for segment in stored:
        await require_encoded(store, segment)
    await require_nothing_loose(store, *[await manifest_of(store, segment) for segment in stored])


async def test_a_segment_deleted_during_encoding_stays_deleted(local: Meddler) -> None:
    gone, stays = await stored_in(local, 2)

    async def delete_it() -> None:
        await delete_segment(local, gone.manifest)

    local.before_replace = delete_it
    tally = (await encode(local)).tally
    local.before_replace = None
    assert (tally.num_encoded, tally.num_changed, tally.failures) == (1, 1, {})
    await require_encoded(local, stays)
    left = {name for name in await names(local) if gone.manifest.key.stem in name}
    assert all(name.endswith(".kvd") for name in left)  # the store collects those, by their age
    assert (await local.lookup(gone.manifest.key.namespace, gone.manifest.page_hashes)).hits == ()


async def test_data_evicted_before_it_is_read_is_no_failure(local: Meddler) -> None:
    """The store evicts the segment after its manifest is read and before its data is."""
    (segment,) = await stored_in(local)
    local.evicted = (segment.manifest.key.manifest_name, segment.data_name)
    tally = (await encode(local)).tally
    assert (tally.num_changed, tally.failures) == (1, {})
    assert await names(local) == set()


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
    await require_nothing_loose(local, await manifest_of(local, segment))


async def test_manifest_is_not_replaced_if_new_data_reads_back_wrong(local: Meddler) -> None:
    (segment,) = await stored_in(local)
    local.garbles_puts = True
    tally = (await encode(local)).tally
    assert "checksum" in tally.failures[segment.manifest.key.manifest_name]
    assert await manifest_of(local, segment) == segment.manifest
    local.garbles_puts, local.garbles = False, ""
    assert await local.get(segment.data_name) == segment.data


async def test_no_variant_is_dropped_for_a_corrupt_one(local: Meddler) -> None:
    (segment,) = await stored_in(local)
    await encode(local, keep_source=True)
    manifest = await manifest_of(local, segment)
    local.garbles = manifest.data_name(manifest.variants[0])
    tally = (await encode(local)).tally
    assert list(tally.failures) == [manifest.key.manifest_name]
    assert await manifest_of(local, segment) == manifest


async def test_variants_with_different_content_are_corrupt(local: Meddler) -> None:
    (segment,) = segments(1)
    variant = segment.manifest.variants[0]
    chunks = (msgspec.structs.replace(variant.chunks[0], decoded_checksum=bytes(16)), *variant.chunks[1:])
    other = msgspec.structs.replace(variant, chunks=chunks, resolution="1080p")
    lying = msgspec.structs.replace(segment.manifest, variants=(variant, other))
    await commit_segment(local, CodedSegment(lying, segment.data, (segment.data,)))
    tally = (await encode(local)).tally
    assert "differ" in tally.failures[segment.manifest.key.manifest_name]
    assert await manifest_of(local, segment) == lying


@pytest.mark.process
async def test_leftovers_of_a_dead_encoder_are_used_or_deleted(store: AdminStore) -> None:
    """One encoder was killed between data and manifest, another between manifest and deletion."""
    half, whole = await stored_in(store, 2)
    orphan = segments(3)[2]  # without a manifest: nobody's here
    await store.put(orphan.data_name, orphan.data)
    left = transcode(half.manifest, half.data, HEVC)
    useless = transcode(half.manifest, half.data, make_targets(["deflate"], ["240p"]))
    done = transcode(whole.manifest, whole.data, HEVC)
    for each in (left, useless, done):
        for name, data in each.data_objects():
            await store.put(name, data)
    await store.put(done.manifest.key.manifest_name, done.manifest.encode())

    # A slow encoder looks at the useless data while it is younger than its manifest, and leaves it to the next one.
    first, second = [(await encode(store)).tally for _ in range(2)]
    assert (first.num_encoded, first.num_done) == (1, 1)
    assert first.num_deleted + second.num_deleted == 3  # both sources, and the useless data
    for segment in (half, whole):
        await require_encoded(store, segment)
    assert await store.delete(orphan.data_name)
    await require_nothing_loose(store, *[await manifest_of(store, segment) for segment in (half, whole)])


async def test_watch_encodes_new_segments_and_survives_an_outage(
    local: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = segments(2)
    is_down, num_failed, get = False, 0, local.get

    async def flaky_get(name: str, start: int = 0, length: int | None = None) -> bytes | None:
        nonlocal num_failed
        if is_down:
            num_failed += 1
            raise StoreError("refused", "as told", retriable=True)
        return await get(name, start, length)

    monkeypatch.setattr(local, "get", flaky_get)
    await commit_segment(local, first)
    encoder = Encoder(local, EncodeOptions(HEVC, grace_s=0))
    watching = asyncio.create_task(encoder.watch(0.02))
    await until_encoded(encoder, 1)
    is_down = True
    await commit_segment(local, second)
    await until(lambda: num_failed >= 3)
    assert not watching.done()
    is_down = False
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


class TestGarbage:
    async def test_data_that_is_named_again_is_kept(self, local: Meddler) -> None:
        now = 0.0
        (segment,) = segments(1)
        made = transcode(segment.manifest, segment.data, HEVC)
        ((name, data),) = made.data_objects()
        await commit_segment(local, segment)
        await local.put(name, data)
        garbage = Garbage(local, 10, clock=lambda: now)
        garbage.record_unnamed([name])
        assert garbage.due_in_s == 10
        now = 10.0
        assert await local.replace(made.manifest.key.manifest_name, made.manifest.encode(), digest(segment))
        await garbage.delete_due()
        assert await local.head(name) is not None
        assert garbage.due_in_s is None

    async def test_data_younger_than_the_manifest_is_kept(self, local: Meddler) -> None:
        """An encoder may need longer than the grace period to read back the data that it put."""
        (segment,) = await stored_in(local)
        made = transcode(segment.manifest, segment.data, HEVC)
        ((name, data),) = made.data_objects()
        await local.put(name, data)
        manifest = await local.head(segment.manifest.key.manifest_name)
        assert manifest is not None
        for age_s, stays in ((5, True), (-5, False)):
            put_s = manifest.modified_s + age_s
            os.utime(local.root / name, (put_s, put_s))
            garbage = Garbage(local, grace_s=0)
            garbage.record_unnamed([name])
            await garbage.delete_due()
            assert (await local.head(name) is not None) == stays
            assert len(garbage) == 0

    async def test_a_failed_deletion_does_not_block_others(self, local: Meddler) -> None:
        class Stubborn(LocalStore):
            async def delete_unnamed(self, name: str) -> bool:
                if name == first.data_name:
                    raise StoreError("io", "as told")
                return await super().delete_unnamed(name)

        now = 0.0
        first, second = segments(2)
        store = Stubborn(local.root)
        garbage = Garbage(store, 10, clock=lambda: now)
        for segment in (first, second):
            await commit_segment(store, segment)
            await commit_segment(store, transcode(segment.manifest, segment.data, HEVC))
            garbage.record_unnamed([segment.data_name])
        now = 10.0
        with pytest.raises(StoreError, match="as told"):
            await garbage.delete_due()
        await garbage.delete_due()
        assert await store.head(second.data_name) is None
        assert await store.head(first.data_name) is not None
        assert (len(garbage), garbage.due_in_s) == (1, 10)
        await store.close()


def digest(segment: CodedSegment) -> str:
    return object_digest(segment.manifest.encode())
