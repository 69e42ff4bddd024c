"""Which profile a server takes from its store, and what it does without one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.quant.profile import Profile, load_profile
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.plane import access, profiles
from sgl_kvfetch.plane.profiles import PassedOver, take_from_store, take_profile
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.protocol.messages import ProfileNeeds
from sgl_kvfetch.protocol.quantiser import require_profile_file
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.notes import ListedProfile, publish_profile, read_profile, seal_profile
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import CALIBRATION, make_profile
from tests.segments import using
from tests.stores.test_profiles import KEY, KEYS, NO_KEYS, WEIGHTS, save

GEOMETRY = KVGeometry(num_layers=1, num_heads=1, k_head_dim=8, v_head_dim=8, page_size=4, dtype="bfloat16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KVFetchConfig:
    """Of a store in a directory, which these tests open without a server."""
    config, opened = parse_config({"store": "http://store:8700", "quantiser": "klt"}), access.open_profile_store

    def open_store(asked: KVFetchConfig) -> AdminStore:
        return LocalStore(tmp_path / "store") if asked.store == config.store else opened(asked)

    monkeypatch.setattr(profiles, "open_profile_store", open_store)
    return config


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of profiles that are read whole from the store."""
    digests: list[str] = []

    async def noted(store: AdminStore, listed: ListedProfile, keys: StoreKeys) -> bytes:
        digests.append(listed.digest)
        return await read_profile(store, listed, keys)

    monkeypatch.setattr(profiles, "read_profile", noted)
    return digests


def fits(path: str) -> None:
    """Take any profile."""


def publish(root: Path, path: Path, age_s: float, keys: StoreKeys = NO_KEYS) -> str:
    """Put a profile as if ``age_s`` ago. Return its digest."""
    name = using(LocalStore(root), lambda store: publish_profile(store, path, keys))
    put_s = 1e9 - age_s
    os.utime(root / ".profiles" / name, (put_s, put_s))
    return name.partition("/")[2]


def taken(config: KVFetchConfig, digest: str | None = None) -> Profile:
    found = take_profile(config, WEIGHTS, fits, digest)
    assert found is not None
    profile = load_profile(Path(found.path))
    assert profile.digest == found.digest
    return profile


def test_the_newest_that_is_not_withdrawn(tmp_path: Path, config: KVFetchConfig, cache: Path) -> None:
    root = tmp_path / "store"
    assert take_profile(config, WEIGHTS, fits) is None
    publish(root, save(tmp_path, weights="1" * 32), 0)  # of another model
    assert take_profile(config, WEIGHTS, fits) is None
    old, new = (publish(root, save(tmp_path, number), 20 - number) for number in (1, 2))
    assert taken(config).digest == new
    assert taken(config, old).digest == old  # as another rank has chosen
    found = take_profile(config, WEIGHTS, fits)
    assert found is not None
    assert Path(found.path).is_relative_to(cache)
    assert Path(found.path).stat().st_mode & 0o077 == 0
    assert new in found.about
    (root / ".profiles" / WEIGHTS / new).unlink()
    assert taken(config).digest == old
    (root / ".profiles" / WEIGHTS / old).unlink()
    assert take_profile(config, WEIGHTS, fits) is None  # copies of withdrawn profiles do not count


def test_a_copy_is_not_read_again_unless_it_is_damaged(
    tmp_path: Path, config: KVFetchConfig, wholes: list[str]
) -> None:
    digest = publish(tmp_path / "store", save(tmp_path), 0)
    for _ in range(2):
        found = take_profile(config, WEIGHTS, fits)
        assert wholes == [digest]
    assert found is not None
    Path(found.path).write_bytes(b"damaged")
    assert taken(config).digest == digest
    assert wholes == [digest] * 2


@pytest.mark.parametrize("kind", ["damaged", "foreign", "not encrypted"])
def test_what_cannot_be_used_is_passed_over(
    tmp_path: Path, config: KVFetchConfig, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    root, message = tmp_path / "store", ""
    keys = NO_KEYS
    if kind == "not encrypted":
        keys = KEYS
        (tmp_path / "key").write_text(KEY.hex())
        config = config.model_copy(update={"key_file": str(tmp_path / "key")})
    good = publish(root, save(tmp_path, 1), 20, keys)
    bad = publish(root, save(tmp_path, 2), 10)
    path = root / ".profiles" / WEIGHTS / bad
    content = path.read_bytes()
    match kind:
        case "damaged":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            message = "it is damaged: its SHA-256"
        case "foreign":  # by whoever may write into the store
            name, data = seal_profile(save(tmp_path, 2, "1" * 32), NO_KEYS)
            path.write_bytes(data.replace(b'"weights":"' + b"1" * 32, b'"weights":"' + b"0" * 32))
            message = f"it is the profile {name}, under another name"
        case _:
            message = "it is not encrypted, and there is a key_file"
    caplog.set_level(logging.WARNING)
    assert taken(config).digest == good
    (record,) = [record for record in caplog.records if record.name == profiles.__name__]
    assert f"profile {WEIGHTS}/{bad} is passed over: {message}" in record.message


def test_one_of_another_shape_is_passed_over(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the newest may be, which somebody made for other TP sizes, or that misses this server's target."""
    root, needs = tmp_path / "store", ProfileNeeds(GEOMETRY, (0,), 0, 0, 1)
    good = publish(root, save(tmp_path), 20)
    other = tmp_path / "other"
    replace(make_profile(num_layers=1), calibration=CALIBRATION).save(other)
    bad = publish(root, other, 10)
    for is_there in (True, False):
        found = take_profile(config, WEIGHTS, partial(require_profile_file, needs))
        assert found is not None
        assert found.digest == good
        assert "is for another model: it has 4 KV heads per rank, the engine has 1" in caplog.text
        if is_there:
            assert f"profile {WEIGHTS}/{bad} is passed over: " in caplog.text
            caplog.clear()
            monkeypatch.setattr(profiles, "take_from_store", is_down)  # and the same of copies
            os.utime(found.path, (1e9, 1e9))  # so that the other one was taken last
    monkeypatch.setattr(profiles, "take_from_store", take_from_store)
    beyond = msgspec.structs.replace(needs, target_kl=1.0)
    assert take_profile(config, WEIGHTS, partial(require_profile_file, beyond)) is None
    assert "target_kl = 1 is outside this profile's range" in caplog.text


def test_who_asks_again_is_told_once_of_each_that_cannot_be_used(
    tmp_path: Path, config: KVFetchConfig, wholes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    root, passed_over = tmp_path / "store", PassedOver()

    def ask() -> None:
        assert asyncio.run(take_from_store(config, WEIGHTS, fits, None, passed_over)) is None

    bad = publish(root, save(tmp_path), 10)
    path = root / ".profiles" / WEIGHTS / bad
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for put in (1, 2):  # another one may have been put under its name
        os.utime(path, (1e9 + put, 1e9 + put))
        ask()
        ask()
        assert (caplog.text.count("is passed over"), wholes) == (put, [bad] * put)


def test_a_profile_that_the_store_fails_to_send_is_asked_for_again(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(store: AdminStore, listed: ListedProfile, keys: StoreKeys) -> bytes:
        raise StoreError("io", "a disk's fault")

    passed_over = PassedOver()
    digest = publish(tmp_path / "store", save(tmp_path), 10)
    monkeypatch.setattr(profiles, "read_profile", fails)
    for _ in range(2):
        assert asyncio.run(take_from_store(config, WEIGHTS, fits, None, passed_over)) is None
    assert caplog.text.count("is passed over: a disk's fault") == 1
    monkeypatch.setattr(profiles, "read_profile", read_profile)
    found = asyncio.run(take_from_store(config, WEIGHTS, fits, None, passed_over))
    assert found is not None
    assert found.digest == digest


def test_a_fault_of_any_kind_costs_one_profile(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (publish(tmp_path / "store", save(tmp_path, number), 20 - number) for number in (1, 2))

    def load(path: Path) -> Profile:
        if bad in path.name:
            raise MemoryError("what it says")
        return load_profile(path)

    monkeypatch.setattr(profiles, "load_profile", load)
    assert taken(config).digest == good
    assert f"profile {WEIGHTS}/{bad} is passed over: MemoryError: what it says" in caplog.text
    found = take_profile(config, WEIGHTS, fits)
    assert found is not None
    os.utime(found.path, (1e9, 1e9))
    Path(found.path).with_name(f"{bad}.profile").write_bytes(b"")  # taken last
    monkeypatch.setattr(profiles, "take_from_store", is_down)
    assert taken(config).digest == good
    assert f"{bad}.profile cannot be read: MemoryError: what it says" in caplog.text


def test_encrypted_profiles_have_copies_in_clear(tmp_path: Path, config: KVFetchConfig) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    digest = publish(tmp_path / "store", save(tmp_path), 0, KEYS)
    assert taken(config.model_copy(update={"key_file": str(tmp_path / "key")})).digest == digest
    assert take_profile(config, WEIGHTS, fits) is None


async def is_down(*args: object) -> None:
    raise StoreError("refused", "it is down")


def test_a_store_that_is_down(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        take_profile(config.model_copy(update={"store": "http://127.0.0.1:1"}), WEIGHTS, fits)
    old, new = (publish(tmp_path / "store", save(tmp_path, number), 20 - number) for number in (1, 2))
    assert taken(config).digest == new
    assert taken(config, old).digest == old
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(profiles, "take_from_store", is_down)
    assert taken(config).digest == old  # the last one that was taken here
    assert taken(config, new).digest == new
    assert "cannot be asked for a profile" in caplog.text


def test_copies_count_for_their_store_and_keys(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that wants keys takes no copy that was taken without, nor one of another store."""
    digest = publish(tmp_path / "store", save(tmp_path), 0)
    assert taken(config).digest == digest
    (tmp_path / "key").write_text(KEY.hex())
    monkeypatch.setattr(profiles, "take_from_store", is_down)
    assert taken(config).digest == digest
    for changed in {"key_file": str(tmp_path / "key")}, {"store": str(tmp_path / "other")}:
        with pytest.raises(StoreError, match="it is down"):
            take_profile(config.model_copy(update=changed), WEIGHTS, fits)


def test_a_store_that_does_not_answer(config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and nobody looks at them
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError) as caught:
            take_profile(config.model_copy(update={"store": url}), WEIGHTS, fits)
    assert caught.value.reason == "timeout"


def test_a_machine_that_keeps_no_copies(tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "store", save(tmp_path), 0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="Not a directory; set XDG_CACHE_HOME"):
        take_profile(config, WEIGHTS, fits)
