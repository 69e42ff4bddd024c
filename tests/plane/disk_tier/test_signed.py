"""The disk tier: signed segments of which only a part was read are served while the store fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from harness.reading import read_bytes
from harness.waiting import until
from sgl_kvfetch.codec.container.encryption import EncryptionKeys, ManifestKeys, StoreKeys
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest, split_signature, whole_of
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.testing import FOLDER, make_segment, parts, put_segment
from tests.codec.container import test_levels as laddered
from tests.plane.disk_tier.tiers import CHAIN, MANIFEST_NAME, SEGMENT, Events, MakeTier, RemoteStore, fetch, read

KEYS = ManifestKeys([b"k" * 32])
OTHER = make_segment(CHAIN, 0, 64, codec="deflate")
_MANIFEST = msgspec.structs.replace(SEGMENT.manifest, variants=SEGMENT.manifest.variants + OTHER.manifest.variants)
BOTH = secure_segment(CodedSegment(_MANIFEST, SEGMENT.data, (OTHER.data,)), StoreKeys(KEYS))
DOWN = StoreError("refused", "as told")


@pytest.fixture
async def tier(make: MakeTier, remote: RemoteStore, events: Events) -> DiskTier:
    """Has read one of two variants of a signed segment. The store is down."""
    tier = make()
    signed = KeyedStore(tier, StoreKeys(KEYS))
    await put_segment(signed, BOTH)
    await signed.lookup(FOLDER, CHAIN)
    assert await read(signed, BOTH, 1) == OTHER.data
    await until(lambda: events.fills["stored"] == 1)
    remote.error = DOWN
    return tier


async def found(tier: DiskTier, keys: ManifestKeys = KEYS) -> list[Manifest]:
    """The manifests that a server with keys finds."""
    hits = (await KeyedStore(tier, StoreKeys(keys)).lookup(FOLDER, CHAIN)).hits
    return [decode_manifest(hit.manifest) for hit in hits]


async def test_a_variant_that_was_read_is_served(tier: DiskTier, events: Events) -> None:
    (manifest,) = await found(tier)
    assert manifest.variants == BOTH.manifest.variants[1:]
    events.forget()
    assert await read(tier, CodedSegment(manifest, OTHER.data)) == OTHER.data
    assert events.bytes == {"disk": len(OTHER.data)}
    assert not events.failures
    assert await found(tier, ManifestKeys([b"x" * 32])) == []


async def test_after_all_variants_were_read_the_manifest_is_the_stores(
    tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    (before,) = (await tier.lookup(FOLDER, CHAIN)).hits
    assert split_signature(before.manifest)[1] == b""
    remote.error = None
    stored = await remote.get(MANIFEST_NAME)
    assert whole_of(before.manifest) == stored
    await KeyedStore(tier, StoreKeys(KEYS)).lookup(FOLDER, CHAIN)
    assert await read(tier, BOTH, 0) == SEGMENT.data
    await until(lambda: events.fills["stored"] == 2)
    remote.error = DOWN
    (hit,) = (await tier.lookup(FOLDER, CHAIN)).hits
    assert hit.manifest == stored
    assert await found(tier) == [BOTH.manifest]


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0), (2, 0), (0, 1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("keys", [StoreKeys(KEYS), StoreKeys()], ids=["signed", "unsigned"])
async def test_levels_that_were_read_are_served(
    make: MakeTier, remote: RemoteStore, events: Events, keys: StoreKeys, order: tuple[int, ...]
) -> None:
    """The disk's own manifest says which are not there, in whatever order the others have come."""
    segment = secure_segment(laddered.segment(), keys)
    folder, hashes = laddered.SPEC.heads.folder, segment.manifest.page_hashes
    signed = KeyedStore(make(), keys)
    await commit_segment(signed, segment)
    await signed.lookup(folder, hashes)
    objects = list(segment.data_objects())
    for count, level in enumerate(order, 1):
        name, content = objects[level]
        assert await read_bytes(signed, name, 0, len(content)) == content
        await until(partial(_has_stored, events, count))
    remote.error = DOWN
    (hit,) = (await signed.lookup(folder, hashes)).hits
    (variant,) = decode_manifest(hit.manifest).variants
    kept = next(count for count in range(laddered.LEVELS + 1) if count not in order)
    assert (1 + len(variant.levels), variant.num_dropped) == (kept, laddered.LEVELS - kept)
    for name, content in objects[:kept]:
        assert await read_bytes(signed, name, 0, len(content)) == content


def _has_stored(events: Events, count: int) -> bool:
    return events.fills["stored"] == count


async def test_encrypted_and_signed_segments_are_served(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    keys = StoreKeys(KEYS, EncryptionKeys({"name": bytes(32)}))
    signed = KeyedStore(tier := make(), keys)
    segment = secure_segment(BOTH, keys)
    await put_segment(signed, segment)
    await signed.lookup(FOLDER, CHAIN)
    assert await read(signed, segment, 1) == segment.variant_data(1)
    await until(lambda: events.fills["stored"] == 1)
    remote.error = DOWN
    (hit,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert decode_manifest(hit.manifest).variants == segment.manifest.variants[1:]
    other = StoreKeys(KEYS, EncryptionKeys({"other": bytes(32)}))
    assert (await KeyedStore(tier, other).lookup(FOLDER, CHAIN)).hits == ()


def _other_expiry(part: Manifest) -> Manifest:
    return msgspec.structs.replace(part, expires=1 << 35)


def _no_codec(part: Manifest) -> Manifest:
    return msgspec.structs.replace(part, variants=(msgspec.structs.replace(part.variants[0], codec=""),))


@pytest.mark.parametrize("change", [_other_expiry, _no_codec])
async def test_a_part_must_be_one_of_what_was_signed(
    change: Callable[[Manifest], Manifest], tier: DiskTier, remote: RemoteStore
) -> None:
    part, whole = decode_manifest(await _on_disk(tier)), whole_of(await _on_disk(tier))
    await tier._disk.put(MANIFEST_NAME, change(part).encode(whole))
    assert await found(tier) == []
    await tier._disk.put(MANIFEST_NAME, part.encode(whole))
    assert len(await found(tier)) == 1


async def test_an_original_that_was_altered_is_refused(tier: DiskTier) -> None:
    part, whole = decode_manifest(await _on_disk(tier)), whole_of(await _on_disk(tier))
    unsigned, _ = split_signature(whole)
    for altered in (unsigned, whole[:-1] + bytes([whole[-1] ^ 1]), BOTH.manifest.encode(), b"nonsense"):
        await tier._disk.put(MANIFEST_NAME, part.encode(altered))
        assert await found(tier) == []


async def test_only_the_disk_may_leave_something_out(tier: DiskTier, remote: RemoteStore) -> None:
    """A store that holds back levels or variants of a signed segment is refused, as ever."""
    part = await _on_disk(tier)
    remote.error = None
    await remote.put(MANIFEST_NAME, part)
    assert parts(await tier.lookup(FOLDER, CHAIN)) == [(0, 64)]
    assert await found(tier) == []


async def test_a_part_that_would_be_too_large_is_kept_without_the_original(
    make: MakeTier, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_MANIFEST_BYTES", 1000)
    signed = KeyedStore(tier := make(), StoreKeys(KEYS))
    await put_segment(signed, BOTH)
    await signed.lookup(FOLDER, CHAIN)
    assert await read(signed, BOTH, 1) == OTHER.data
    await until(lambda: events.fills["stored"] == 1)
    assert whole_of(await _on_disk(tier)) == b""
    remote.error = DOWN
    assert await found(tier) == []
    assert not events.failures


async def test_unsigned_parts_are_kept_without_the_original(
    tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    """Nobody would look at it."""
    remote.error = None
    await remote.put(MANIFEST_NAME, BOTH.manifest.encode())
    await tier._disk.delete_prefix("")
    assert await fetch(tier, BOTH, 1) == OTHER.data
    await until(lambda: events.fills["stored"] == 2)
    assert whole_of(await _on_disk(tier)) == b""


async def _on_disk(tier: DiskTier) -> bytes:
    content = await tier._disk.get(MANIFEST_NAME)
    assert content is not None
    return content
