from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch import user_files
from sgl_kvfetch.codec import NO_KEYS, StoreKeys, decode_manifest, open_manifest
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Lookup, keyed, with_keys
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.tools.encoder import EncodeOptions, Encoder, make_targets
from sgl_kvfetch.user_files import FreshFiles

CHAIN = page_hashes(8)
KEY = b"k" * 32
KEYS, OTHERS = StoreKeys(KEY), StoreKeys(b"o" * 32)
FIRST = make_segment(CHAIN, 0, 4)
NAME = FIRST.manifest.key.manifest_name


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    yield store
    await store.close()


@pytest.fixture
def encrypted(plain: LocalStore) -> KeyedStore:
    return KeyedStore(plain, KEYS)


async def test_a_key_file_that_changes_counts_with_the_next_lookup(
    plain: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "key"
    path.write_text("aa" * 32)
    path.chmod(0o600)
    store = KeyedStore(plain, FreshFiles("keys", [path], lambda: StoreKeys.read(path)))
    await put_segment(store, FIRST)
    path.write_text("too short")  # which leaves the key as it is
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    path.write_text("bb" * 32)
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    path.write_text("bb" * 32 + "\n" + "aa" * 32)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_what_is_not_encrypted_is_not_put(encrypted: KeyedStore) -> None:
    with pytest.raises(StoreError, match="not a manifest"):
        await encrypted.put(NAME, b"nonsense")
    with pytest.raises(AssertionError, match="must be encrypted"):
        await encrypted.put(NAME, FIRST.manifest.encode())
    with pytest.raises(StoreError, match="only a whole manifest"):
        await encrypted.get(NAME, 5, 10)


@pytest.mark.parametrize("keys", [NO_KEYS, OTHERS])
async def test_what_others_encrypted_or_did_not_is_a_miss_that_names_the_key(
    plain: LocalStore, encrypted: KeyedStore, keys: StoreKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(keyed._limited, "warning", lambda key, text: said.append(text))
    await put_segment(with_keys(plain, keys), FIRST)
    assert await encrypted.lookup(FOLDER, CHAIN) == Lookup(())
    assert await encrypted.get(NAME) is None
    assert said
    assert all((f"the keys {OTHERS.ids[0]}" if keys else "without encryption") in text for text in said)
    # It does not keep their place from our own segment.
    await put_segment(encrypted, FIRST)
    assert parts(await encrypted.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_the_encoder_encrypts_and_names_the_key_that_it_lacks(plain: LocalStore, encrypted: KeyedStore) -> None:
    await put_segment(encrypted, FIRST)
    before = await plain.get(NAME)
    options = EncodeOptions(targets=make_targets(["deflate"], ["240p"]), workers=1, grace_s=0)
    for keys in (NO_KEYS, KEYS):
        encoder = Encoder(plain, options, keys=keys)
        await encoder.run_once()
        await encoder.close()
        content = await plain.get(NAME)
        if not keys:
            assert f"encrypted with the key {KEYS.ids[0]}" in encoder.tally.failures[NAME]
            assert content == before
    assert (encoder.tally.num_encoded, encoder.tally.failures) == (1, {})
    assert content is not None
    (made,), (old,) = open_manifest(decode_manifest(content), KEYS).variants, FIRST.manifest.variants
    assert made.codec == "deflate"
    assert [each.decoded_checksum for each in made.chunks] == [each.decoded_checksum for each in old.chunks]
