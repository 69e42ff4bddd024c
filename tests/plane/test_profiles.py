"""Which profile a server takes from its store, and what it does without one."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.quant.profile import Profile, load_profile
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.plane import access, profiles
from sgl_kvfetch.plane.profiles import PassedOver, take_from_store, take_profile
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.protocol.messages import ProfileNeeds, TakenProfile
from sgl_kvfetch.protocol.quantiser import require_profile_file
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.notes import ListedProfile, publish_profile, read_profile, seal_profile
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import CALIBRATION, make_profile
from tests.segments import using
from tests.stores.test_profiles import KEY, KEYS, NO_KEYS, WEIGHTS, save

GEOMETRY = KVGeometry(num_layers=1, num_heads=1, k_head_dim=8, v_head_dim=8, page_size=4, dtype="bfloat16")
IS_DOWN = AsyncMock(side_effect=StoreError("refused", "it is down"))


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
    (copy,) = cache.rglob(f"{new}.profile")
    assert copy.stat().st_mode & 0o077 == 0
    (root / ".profiles" / WEIGHTS / new).unlink()
    assert taken(config).digest == old
    (root / ".profiles" / WEIGHTS / old).unlink()
    assert take_profile(config, WEIGHTS, fits) is None  # copies of withdrawn profiles do not count


def test_a_copy_is_not_read_again_unless_it_is_damaged(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=read_profile)
    monkeypatch.setattr(profiles, "read_profile", read)
    digest = publish(tmp_path / "store", save(tmp_path), 0)
    for _ in range(2):
        found = take_profile(config, WEIGHTS, fits)
        assert read.call_count == 1
    assert found is not None
    Path(found.path).write_bytes(b"damaged")
    assert taken(config).digest == digest
    assert read.call_count == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("damaged", "it is damaged: its SHA-256"),
        ("foreign", ", under another name"),  # by whoever may write into the store
        ("not encrypted", "it is not encrypted, and there is a key_file"),
    ],
)
def test_what_cannot_be_used_is_passed_over(
    tmp_path: Path, config: KVFetchConfig, caplog: pytest.LogCaptureFixture, kind: str, message: str
) -> None:
    keys = NO_KEYS
    if kind == "not encrypted":
        (tmp_path / "key").write_text(KEY.hex())
        keys, config = KEYS, config.model_copy(update={"key_file": str(tmp_path / "key")})
    good = publish(tmp_path / "store", save(tmp_path, 1), 20, keys)
    bad = publish(tmp_path / "store", save(tmp_path, 2), 10)
    path = tmp_path / "store" / ".profiles" / WEIGHTS / bad
    if kind == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif kind == "foreign":
        _, data = seal_profile(save(tmp_path, 2, "1" * 32), NO_KEYS)
        path.write_bytes(data.replace(b'"weights":"' + b"1" * 32, b'"weights":"' + b"0" * 32))
    assert taken(config).digest == good
    assert f"profile {WEIGHTS}/{bad} is passed over: " in caplog.text
    assert message in caplog.text


def test_one_of_another_shape_is_passed_over_in_the_store_and_among_copies(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the newest may be, which somebody made for other TP sizes."""
    root, needs = tmp_path / "store", ProfileNeeds(GEOMETRY, (0,), 0, 0, 1)
    good, other = publish(root, save(tmp_path), 20), tmp_path / "other"
    replace(make_profile(num_layers=1), calibration=CALIBRATION).save(other)
    publish(root, other, 10)
    for _ in range(2):
        found = take_profile(config, WEIGHTS, partial(require_profile_file, needs))
        assert found is not None
        assert found.digest == good
        assert "is for another model: it has 4 KV heads per rank, the engine has 1" in caplog.text
        caplog.clear()
        monkeypatch.setattr(profiles, "take_from_store", IS_DOWN)
        os.utime(found.path, (1e9, 1e9))  # so that the other one was taken last


def test_who_asks_again_is_told_once_of_each_that_cannot_be_used(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the store fails to send is asked for again, and so is one that was put again."""
    asked: list[str] = []
    fault: list[Exception] = [StoreError("io", "a disk's fault")]

    async def read(store: AdminStore, listed: ListedProfile, keys: StoreKeys) -> bytes:
        asked.append(listed.digest)
        if listed.digest == unsent and fault:
            raise fault[0]
        return await read_profile(store, listed, keys)

    def ask() -> TakenProfile | None:
        return asyncio.run(take_from_store(config, WEIGHTS, fits, None, passed_over))

    monkeypatch.setattr(profiles, "read_profile", read)
    root, passed_over = tmp_path / "store", PassedOver()
    unsent, bad = (publish(root, save(tmp_path, number), 20 - number) for number in (1, 2))
    path = root / ".profiles" / WEIGHTS / bad
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for put in (1, 2):
        os.utime(path, (1e9 + put, 1e9 + put))
        assert (ask(), ask()) == (None, None)
        assert caplog.text.count("is passed over") == 1 + put
        assert (asked.count(bad), asked.count(unsent)) == (put, 2 * put)
    fault.clear()
    found = ask()
    assert found is not None
    assert found.digest == unsent


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
    (copy,) = tmp_path.rglob(f"{good}.profile")
    os.utime(copy, (1e9, 1e9))
    copy.with_name(f"{bad}.profile").write_bytes(b"")  # taken last
    monkeypatch.setattr(profiles, "take_from_store", IS_DOWN)
    assert taken(config).digest == good
    assert f"{bad}.profile cannot be read: MemoryError: what it says" in caplog.text


def test_a_store_that_is_down(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        take_profile(config.model_copy(update={"store": "http://127.0.0.1:1"}), WEIGHTS, fits)
    old, new = (publish(tmp_path / "store", save(tmp_path, number), 20 - number) for number in (1, 2))
    assert taken(config).digest == new
    assert taken(config, old).digest == old
    monkeypatch.setattr(profiles, "take_from_store", IS_DOWN)
    assert taken(config).digest == old  # the last one that was taken here
    assert taken(config, new).digest == new
    assert "cannot be asked for a profile" in caplog.text


def test_copies_count_for_their_store_and_keys(
    tmp_path: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without keys takes no copy that was taken with them, nor one of another store."""
    (tmp_path / "key").write_text(KEY.hex())
    with_key = config.model_copy(update={"key_file": str(tmp_path / "key")})
    digest = publish(tmp_path / "store", save(tmp_path), 0, KEYS)
    assert taken(with_key).digest == digest  # whose copy is in clear
    assert take_profile(config, WEIGHTS, fits) is None
    monkeypatch.setattr(profiles, "take_from_store", IS_DOWN)
    assert taken(with_key).digest == digest
    for changed in config, with_key.model_copy(update={"store": str(tmp_path / "other")}):
        with pytest.raises(StoreError, match="it is down"):
            take_profile(changed, WEIGHTS, fits)


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
