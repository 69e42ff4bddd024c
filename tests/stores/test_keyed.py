from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sgl_kvfetch import user_files
from sgl_kvfetch.codec.container.encryption import EncryptionKeys, ManifestKeys, StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest, encryption_keys_of, split_signature
from sgl_kvfetch.codec.container.protect import open_manifest, secure_segment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import keyed
from sgl_kvfetch.stores.base import Lookup, object_digest
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.testing import FOLDER, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.tools.encoder import EncodeOptions, Encoder, make_targets
from sgl_kvfetch.user_files import FreshFiles

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
def signed(plain: LocalStore) -> KeyedStore:
    return KeyedStore(plain, StoreKeys(KEYS))


async def test_servers_with_the_key_find_what_they_stored(plain: LocalStore, signed: KeyedStore) -> None:
    await put_segment(signed, FIRST)
    (hit,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert decode_manifest(hit.manifest).variants[0].chunk_digests
    assert await signed.get(NAME) == hit.manifest
    # So do servers without a key.
    assert parts(await plain.lookup(FOLDER, CHAIN)) == [(0, 4)]


@pytest.mark.parametrize("keys", [None, OTHER_KEYS])
async def test_what_others_stored_is_a_miss(
    plain: LocalStore, signed: KeyedStore, keys: ManifestKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    await put_segment(signed, FIRST)
    await put_segment(plain if keys is None else KeyedStore(plain, StoreKeys(keys)), SECOND)
    assert parts(await plain.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]
    assert parts(await signed.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert await signed.lookup(FOLDER, CHAIN[4:]) == Lookup(())
    assert await signed.get(SECOND.manifest.key.manifest_name) is None
    assert caplog.text.count("without a valid signature") <= 1  # an earlier test may have caused it
    # It does not keep their place from our own segment.
    await put_segment(signed, SECOND)
    assert parts(await signed.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]


async def test_a_key_file_that_changes_counts_with_the_next_lookup(
    plain: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "key"
    path.write_text("a" * 32)
    path.chmod(0o600)
    store = KeyedStore(plain, FreshFiles("keys", [path], lambda: StoreKeys.read(path, None)))
    await put_segment(store, FIRST)
    path.write_text("too short")  # which leaves the key as it is
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    path.write_text("b" * 32)
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    path.write_text("b" * 32 + "\n" + "a" * 32)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_replacing_compares_with_what_the_store_holds(signed: KeyedStore) -> None:
    await put_segment(signed, FIRST)
    before = await signed.get(NAME)
    assert before is not None
    other = secure_segment(make_segment(CHAIN, 0, 4, codec="deflate"), StoreKeys(KEYS))
    await signed.put(other.data_name, other.data)
    after = other.manifest.encode()
    assert not await signed.replace(NAME, after, object_digest(split_signature(before)[0]))
    assert await signed.get(NAME) == before
    assert await signed.replace(NAME, after, object_digest(before))
    assert await signed.get(NAME) == KEYS.sign(after)


async def test_nonsense_is_not_signed(signed: KeyedStore) -> None:
    with pytest.raises(StoreError, match="not a manifest"):
        await signed.put(NAME, b"nonsense")
    with pytest.raises(StoreError, match="only a whole manifest"):
        await signed.get(NAME, 5, 10)


async def test_the_encoder_keeps_signatures_and_does_nothing_without_the_key(
    plain: LocalStore, signed: KeyedStore
) -> None:
    await put_segment(signed, FIRST)
    before = await plain.get(NAME)
    options = EncodeOptions(targets=make_targets(["deflate"], ["240p"]), workers=1, grace_s=0)
    without = Encoder(plain, options)
    await without.run_once()
    await without.close()
    assert "is signed" in without.tally.failures[NAME]
    assert await plain.get(NAME) == before
    encoder = Encoder(plain, options, keys=StoreKeys(KEYS))
    await encoder.run_once()
    await encoder.close()
    assert encoder.tally.num_encoded == 1
    (hit,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert hit.manifest != before
    assert decode_manifest(hit.manifest).variants[0].codec == "deflate"


ENCRYPTION, OTHERS = EncryptionKeys({"ours": b"k" * 32}), EncryptionKeys({"theirs": b"o" * 32})


@pytest.fixture
def encrypted(plain: LocalStore) -> KeyedStore:
    return KeyedStore(plain, StoreKeys(KEYS, ENCRYPTION))


async def test_encrypted_segments_are_found_by_their_pages(plain: LocalStore, encrypted: KeyedStore) -> None:
    """Also by a server without the key, which only finds them."""
    await put_segment(encrypted, FIRST)
    (hit,) = (await encrypted.lookup(FOLDER, CHAIN)).hits
    assert parts(await plain.lookup(FOLDER, CHAIN)) == [(0, 4)]
    manifest = decode_manifest(hit.manifest)
    assert manifest.key_names == ["ours"]
    data = await plain.get(manifest.data_name(manifest.variants[0]))
    assert data is not None
    assert FIRST.data[:16] not in data


@pytest.mark.parametrize("keys", [None, OTHERS])
async def test_what_others_encrypted_or_did_not_is_a_miss_that_names_the_key(
    plain: LocalStore, encrypted: KeyedStore, keys: EncryptionKeys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(keyed._limited, "warning", lambda key, text: said.append(text))
    await put_segment(KeyedStore(plain, StoreKeys(KEYS, keys)), FIRST)
    assert await encrypted.lookup(FOLDER, CHAIN) == Lookup(())
    assert await encrypted.get(NAME) is None
    assert all(("without encryption" if keys is None else "the keys 'theirs'") in text for text in said)
    # It does not keep their place from our own segment.
    await put_segment(encrypted, FIRST)
    assert parts(await encrypted.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_many_manifests_are_checked_off_the_event_loop(
    plain: LocalStore, encrypted: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def note(data: bytes) -> set[str]:
        threads.append(threading.current_thread())
        return encryption_keys_of(data)

    monkeypatch.setattr(keyed, "encryption_keys_of", note)
    await put_segment(encrypted, FIRST)
    assert parts(await encrypted.lookup(FOLDER, CHAIN)) == [(0, 4)]
    monkeypatch.setattr(keyed, "_FEW_BYTES", 10)
    assert parts(await encrypted.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_what_must_be_encrypted_is_never_put_without_it(encrypted: KeyedStore) -> None:
    with pytest.raises(AssertionError, match="must be encrypted"):
        await encrypted.put(NAME, FIRST.manifest.encode())


async def test_the_encoder_encrypts_and_names_the_key_that_it_lacks(plain: LocalStore, encrypted: KeyedStore) -> None:
    await put_segment(KeyedStore(plain, StoreKeys(encryption=ENCRYPTION)), FIRST)
    before = await plain.get(NAME)
    options = EncodeOptions(targets=make_targets(["deflate"], ["240p"]), workers=1, grace_s=0)
    without = Encoder(plain, options)
    await without.run_once()
    await without.close()
    assert "encrypted with the key 'ours'" in without.tally.failures[NAME]
    assert await plain.get(NAME) == before
    encoder = Encoder(plain, options, keys=StoreKeys(encryption=ENCRYPTION))
    await encoder.run_once()
    await encoder.close()
    assert (encoder.tally.num_encoded, encoder.tally.failures) == (1, {})
    content = await plain.get(NAME)
    assert content is not None
    made = open_manifest(decode_manifest(content), StoreKeys(encryption=ENCRYPTION))
    assert made.variants[0].codec == "deflate"
    assert [c.decoded_checksum for c in made.variants[0].chunks] == [
        c.decoded_checksum for c in FIRST.manifest.variants[0].chunks
    ]
