from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec.container.manifest import decode_manifest, split_signature
from sgl_kvfetch.codec.container.segment import with_chunk_digests
from sgl_kvfetch.codec.container.signing import ManifestKeys
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Lookup, object_digest
from sgl_kvfetch.stores.signed import SignedStore
from sgl_kvfetch.tools.encoding.encoder import EncodeOptions, Encoder
from sgl_kvfetch.tools.encoding.transcode import make_targets

CHAIN = page_hashes(8)
KEYS, OTHER_KEYS = ManifestKeys([b"k" * 32]), ManifestKeys([b"o" * 32])
FIRST, SECOND = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4)
NAME = FIRST.manifest.key.manifest_name


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    yield store
    await store.close()


@pytest.fixture
def signed(plain: LocalStore) -> SignedStore:
    return SignedStore(plain, KEYS)


async def test_servers_with_the_key_find_what_they_stored(plain: LocalStore, signed: SignedStore) -> None:
    await put_segment(signed, FIRST)
    (hit,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert decode_manifest(hit.manifest).variants[0].chunk_digests
    assert await signed.get(NAME) == hit.manifest
    # So do servers without a key.
    assert parts(await plain.lookup(FOLDER, CHAIN)) == [(0, 4)]


@pytest.mark.parametrize("keys", [None, OTHER_KEYS])
async def test_what_others_stored_is_a_miss(
    plain: LocalStore, signed: SignedStore, keys: ManifestKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    await put_segment(signed, FIRST)
    await put_segment(plain if keys is None else SignedStore(plain, keys), SECOND)
    assert parts(await plain.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]
    assert parts(await signed.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert await signed.lookup(FOLDER, CHAIN[4:]) == Lookup(())
    assert await signed.get(SECOND.manifest.key.manifest_name) is None
    assert caplog.text.count("without a valid signature") <= 1  # an earlier test may have caused it
    # It does not keep their place from our own segment.
    await put_segment(signed, SECOND)
    assert parts(await signed.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]


async def test_replacing_compares_with_what_the_store_holds(signed: SignedStore) -> None:
    await put_segment(signed, FIRST)
    before = await signed.get(NAME)
    assert before is not None
    other = with_chunk_digests(make_segment(CHAIN, 0, 4, codec="deflate"))
    await signed.put(other.data_name, other.data)
    after = other.manifest.encode()
    assert not await signed.replace(NAME, after, object_digest(split_signature(before)[0]))
    assert await signed.get(NAME) == before
    assert await signed.replace(NAME, after, object_digest(before))
    assert await signed.get(NAME) == KEYS.sign(after)


async def test_nonsense_is_not_signed(signed: SignedStore) -> None:
    with pytest.raises(StoreError, match="not a manifest"):
        await signed.put(NAME, b"nonsense")
    with pytest.raises(StoreError, match="only a whole manifest"):
        await signed.get(NAME, 5, 10)


async def test_the_encoder_keeps_signatures_and_does_nothing_without_the_key(
    plain: LocalStore, signed: SignedStore
) -> None:
    await put_segment(signed, FIRST)
    before = await plain.get(NAME)
    options = EncodeOptions(targets=make_targets(["deflate"], ["240p"]), workers=1, grace_s=0)
    without = Encoder(plain, options)
    await without.run_once()
    await without.close()
    assert "is signed" in without.tally.failures[NAME]
    assert await plain.get(NAME) == before
    encoder = Encoder(plain, options, keys=KEYS)
    await encoder.run_once()
    await encoder.close()
    assert encoder.tally.num_encoded == 1
    (hit,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert hit.manifest != before
    assert decode_manifest(hit.manifest).variants[0].codec == "deflate"
