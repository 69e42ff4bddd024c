"""Profiles in every kind of store, and which of them count."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec import NO_KEYS, StoreKeys
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.stores import PROFILES, AdminStore, list_profiles, publish_profile, read_profile
from sgl_kvfetch.stores.notes import seal_profile
from sgl_kvfetch.stores.s3 import S3Store
from tests.codec.quant.profiles import CALIBRATION, make_profile
from tests.stores.conformance import failing

WEIGHTS = CALIBRATION.weights
KEYS = StoreKeys(KEY := b"k" * 32)


def save(folder: Path, num_sinks: int = 0, weights: str = WEIGHTS) -> Path:
    """Write a profile; those of other numbers of sinks have other digests."""
    path = folder / f"{weights[:4]}-{num_sinks}.profile"
    profile = make_profile(num_layers=1, num_heads=1, head_dim=8, cell_layers=1, cell_heads=1, num_sinks=num_sinks)
    calibration = msgspec.structs.replace(CALIBRATION, weights=weights)
    dataclasses.replace(profile, calibration=calibration).save(path)
    return path


@pytest.mark.process
async def test_profiles_are_listed_by_weights(store: AdminStore, tmp_path: Path) -> None:
    assert list(await store.notes(PROFILES)) == []
    path, other = save(tmp_path), save(tmp_path, weights="1" * 32)
    name = await publish_profile(store, path, NO_KEYS)
    assert name.startswith(f"{WEIGHTS}/")
    assert await publish_profile(store, path, NO_KEYS) == name
    await publish_profile(store, other, NO_KEYS)
    (listed,) = await list_profiles(store, f"{WEIGHTS}/")
    assert listed.head is not None
    assert (listed.info.name, listed.head.header.model) == (name, "numbers")
    assert await read_profile(store, listed, NO_KEYS) == path.read_bytes()
    await store.delete_prefix("")
    assert len(await list_profiles(store)) == 2
    assert await store.delete_note(PROFILES, name)
    assert await list_profiles(store, f"{WEIGHTS}/") == []


async def test_a_profile_that_takes_more_than_exact_is_not_published(tmp_path: Path) -> None:
    profile = make_profile(num_layers=1, num_heads=1, head_dim=8, cell_layers=1, cell_heads=1)
    curve = [msgspec.structs.replace(point, bits_per_value=13.0 - i) for i, point in enumerate(profile.curve)]
    dataclasses.replace(profile, curve=tuple(curve)).save(tmp_path / "p")
    store = LocalStore(tmp_path)
    with pytest.raises(ConfigError, match=r"takes 11.5 bits per value at its default, expected fewer than 10.7"):
        await publish_profile(store, tmp_path / "p", NO_KEYS)
    assert list(await store.notes(PROFILES)) == []


@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["no keys", "encrypted"])
async def test_each_damaged_byte_is_noticed(tmp_path: Path, keys: StoreKeys) -> None:
    name, data = seal_profile(save(tmp_path), keys)
    assert (save(tmp_path).read_bytes() in data) == (keys is NO_KEYS)
    store = LocalStore(tmp_path / "store")
    await store.put_note(PROFILES, name, data)
    path = tmp_path / "store" / ".profiles" / name
    for place in (0, 5, 20, 100, data.index(b"sha256") + 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        (listed,) = await list_profiles(store)
        with pytest.raises(FormatError):
            await read_profile(store, listed, keys)
    for cut in (data[:0], data[:7], data[:50], data[:-1], data + b"x"):
        path.write_bytes(cut)
        (listed,) = await list_profiles(store)
        assert listed.head is None
        assert listed.problem
    await store.close()


@pytest.mark.process
async def test_a_store_keeps_nothing_but_the_profile_of_its_name(store: AdminStore, tmp_path: Path) -> None:
    """S3 cannot look at what is put; readers do."""
    name, data = seal_profile(save(tmp_path), NO_KEYS)
    if isinstance(store, S3Store):
        await store.put_note(PROFILES, f"{'1' * 32}/{name[33:]}", data)
        (listed,) = await list_profiles(store)
        assert listed.problem == f"its header belongs to {name}"
        return
    for other, content in ((f"{'1' * 32}/{name[33:]}", data), (name, data[:-1]), (name, b"nonsense")):
        with failing("invalid"):
            await store.put_note(PROFILES, other, content)
    assert list(await store.notes(PROFILES)) == []


@pytest.mark.usefixtures("tiny_stores")
async def test_profiles_take_a_part_of_the_capacity(tmp_path: Path) -> None:
    name, data = seal_profile(save(tmp_path), NO_KEYS)
    segments = [make_segment(page_hashes(16, branch=str(i)), 0, 16) for i in range(8)]
    size = len(segments[0].data) + len(segments[0].manifest.encode())
    small = LocalStore(tmp_path / "small", capacity_bytes=8 * len(data) - 8, min_free_bytes=0)
    with failing("full", r"the limit is \d+, 0\.125 of the capacity"):
        await small.put_note(PROFILES, name, data)
    assert not list((tmp_path / "small").glob(".unfinished/*"))
    await small.close()

    capacity = max(8 * len(data), len(data) + 4 * size)
    store = LocalStore(tmp_path / "store", capacity_bytes=capacity, min_free_bytes=0)
    await store.put_note(PROFILES, name, data)
    for segment in segments * 4:
        await put_segment(store, segment)
    usage = await store.usage()
    assert usage.stored_bytes <= capacity
    assert [info.name for info in await store.notes(PROFILES)] == [name]
    assert parts(await store.lookup(FOLDER, page_hashes(16, branch="7"))) == [(0, 16)]
    await store.close()


async def test_uploads_at_once_count_each_other_before_a_byte_is_sent(tmp_path: Path) -> None:
    name, data = seal_profile(save(tmp_path), NO_KEYS)
    weights = name.partition("/")[0]
    store = LocalStore(tmp_path / "store", capacity_bytes=8 * 3 * len(data), min_free_bytes=0)
    uploads = [store.upload_note(PROFILES, f"{weights}/{i:032x}", len(data)) for i in range(12)]
    begun = await asyncio.gather(*(upload.__aenter__() for upload in uploads), return_exceptions=True)
    refused = [each for each in begun if isinstance(each, StoreError)]
    assert [each.reason for each in refused] == ["full"] * 9
    for upload, each in zip(uploads, begun, strict=True):
        if not isinstance(each, BaseException):
            await upload.__aexit__(None, None, None)
    await store.put_note(PROFILES, name, data)  # what was given up takes nothing
    await store.close()


async def test_profiles_of_some_weights_lock_out_no_others(tmp_path: Path) -> None:
    name, data = seal_profile(save(tmp_path), NO_KEYS)
    weights = name.partition("/")[0]
    store = LocalStore(tmp_path / "store")
    await store.put_note(PROFILES, name, data)
    for i in range(63):
        (tmp_path / "store" / ".profiles" / weights / f"{i:032x}").write_bytes(b"x")
    with failing("full", f"the store has 64 profiles of weights {weights}"):
        await store.put_note(PROFILES, f"{weights}/{'f' * 32}", data)
    await store.put_note(PROFILES, name, data)  # again
    with failing("invalid", "not the profile"):  # of other weights: there is room, were it one
        await store.put_note(PROFILES, f"{'1' * 32}/{'f' * 32}", data)
    await store.close()
