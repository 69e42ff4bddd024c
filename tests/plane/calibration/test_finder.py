"""A data plane finds a profile: it calibrates on prompts in a process of its own, unless a neighbour is sooner."""

from __future__ import annotations

import asyncio
import os
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self
from unittest.mock import DEFAULT, AsyncMock

import msgspec
import pytest

from harness.children import state_of
from harness.models import make_tiny_llama
from harness.serving import serving
from harness.waiting import until
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.calibration import finder, own
from sgl_kvfetch.plane.calibration.finder import ProfileFinder
from sgl_kvfetch.plane.calibration.own import OwnCalibration
from sgl_kvfetch.plane.profiles import cache_folder, take_from_store
from sgl_kvfetch.protocol import messages as m
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.protocol.messages import ProfileNeeds
from sgl_kvfetch.stores import open_remote
from sgl_kvfetch.stores.notes import PROFILES, publish_profile
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import CALIBRATION, make_profile
from tests.stores.test_profiles import NO_KEYS, save

pytestmark = pytest.mark.process

WINDOW = 96  # tokens: the positions of the model
OF_MODEL = KVGeometry(num_layers=1, num_heads=2, k_head_dim=32, v_head_dim=32, page_size=4, dtype="bfloat16")
SMALL = replace(OF_MODEL, num_heads=1, k_head_dim=8, v_head_dim=8)  # of what `save` writes


def of_model(folder: Path, weights: str) -> Path:
    """Write a profile that fits the model."""
    profile = make_profile(num_layers=1, num_heads=2, head_dim=32, cell_layers=1, cell_heads=2)
    replace(profile, calibration=msgspec.structs.replace(CALIBRATION, weights=weights)).save(folder / "of_model")
    return folder / "of_model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    shape = {"num_layers": 1, "hidden_size": 64, "head_dim": 32, "vocab_size": 128}
    return make_tiny_llama(folder, **shape, max_position_embeddings=WINDOW)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(finder, "_ASK_EVERY_S", 0.05)
    return tmp_path / "cache" / "sgl_kvfetch"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[KVFetchConfig]:
    with serving(tmp_path / "store") as url:
        yield parse_config({"store": url, "quantiser": "exact", "codec_threads": 1})


class Finding:
    """A finder at work, and its events."""

    def __init__(self, config: KVFetchConfig, folder: Path, weights: str = "", target_kl: float | None = None) -> None:
        needs = ProfileNeeds(SMALL if weights else OF_MODEL, (0,), 0, 0, 1, target_kl)
        watch = m.Watch(weights or fingerprint_model(str(folder)), str(folder), "tiny", needs)
        self.events: list[m.Event] = []
        self.finder = ProfileFinder(config, watch, self.events.append)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.finder.close()

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        return self.finder._own._process

    async def found(self) -> str:
        await until(lambda: bool(self.events))
        (event,) = self.events
        assert isinstance(event, m.ProfileFound)
        return event.digest

    async def begin_paused(self) -> int:
        """Let it calibrate, and stop it as soon as it can be stopped. Return its process."""
        self.finder.serve(m.PauseCalibration(True))
        self.finder.serve(m.ShowPrompts(windows()))
        await until(lambda: self.process is not None and state_of(self.process.pid) == "T")
        assert self.process is not None
        return self.process.pid


def windows() -> tuple[tuple[bytes, ...], ...]:
    """Of two pieces each, of which the first begins as prompts do: with BOS."""
    rng = random.Random(0)

    def piece(first: int) -> bytes:
        return array("i", [first, *(rng.randrange(3, 128) for _ in range(WINDOW))]).tobytes()

    return tuple((piece(1), piece(3)) for _ in range(6))


async def test_an_interrupted_calibration_goes_on_and_is_published(
    model: Path, config: KVFetchConfig, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next server, whose token is not permitted to publish it at first."""
    folder = cache_folder("calibrations", fingerprint_model(str(model)), config.store)
    async with Finding(config, model) as first:
        pid = await first.begin_paused()
        async with Finding(config, model) as neighbour:  # of the same machine, which leaves it to the first one
            neighbour.finder.serve(m.ShowPrompts(windows()))
            await neighbour.finder._own.begin()
            assert neighbour.process is None
    assert state_of(pid) == "gone"
    assert (folder / "prompts").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    publish = AsyncMock(wraps=publish_profile, side_effect=[StoreError("refused", "HTTP 403"), DEFAULT])
    monkeypatch.setattr(finder, "publish_profile", publish)
    async with Finding(config, model) as second:
        digest = await second.found()
        copy = cache_folder("profiles", fingerprint_model(str(model)), config.store) / f"{digest}.profile"
        profile = load_profile(copy)
        assert (profile.digest, profile.calibration.num_windows) == (digest, 6)
        assert (profile.calibration.context_tokens, profile.calibration.continuation_tokens) == (64, 32)
    assert publish.call_count == 2
    assert not folder.exists()
    store = open_remote(config.store)
    assert [info.name for info in await store.notes(PROFILES)] == [f"{profile.calibration.weights}/{profile.digest}"]
    await store.close()


async def test_a_neighbour_that_is_sooner_ends_the_calibration_if_its_profile_fits(
    model: Path, config: KVFetchConfig, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, store = fingerprint_model(str(model)), open_remote(config.store)
    other = await publish_profile(store, save(tmp_path, weights=weights), NO_KEYS)  # as for other TP sizes
    async with Finding(config, model) as found:
        pid = await found.begin_paused()
        assert f"profile {other} is passed over: profile " in caplog.text
        assert not found.events
        name = await publish_profile(store, of_model(tmp_path, weights), NO_KEYS)
        assert name == f"{weights}/{await found.found()}"
    assert state_of(pid) == "gone"
    assert not list((cache / "calibrations").iterdir())
    await store.close()


async def test_its_own_is_not_published_if_it_does_not_fit(
    model: Path, config: KVFetchConfig, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it misses the server's target: nobody would take it here, and it would be made again and again."""
    weights = fingerprint_model(str(model))
    made = cache_folder("calibrations", weights, config.store) / "profile"
    made.parent.mkdir(parents=True)
    of_model(tmp_path, weights).rename(made)
    async with Finding(config, model, target_kl=1.0) as found:
        found.finder.serve(m.ShowPrompts(windows()))
        await until(lambda: "a profile cannot be made or published here: ConfigError: target_kl = 1 is" in caplog.text)
    store = open_remote(config.store)
    assert not await store.notes(PROFILES)
    await store.close()


def test_what_servers_have_left_is_deleted_after_a_week(cache: Path) -> None:
    """Of any model: users' token ids are in it. But not what a server is at."""
    names = {"old": 8, "young": 6, "in use": 8}
    for name, days in names.items():
        folder = cache / "calibrations" / name
        folder.mkdir(parents=True)
        for path in (folder / "prompts", folder / "lock", folder):
            path.touch()
            os.utime(path, (time.time() - days * 86400,) * 2)
    lock = own._lock_of(cache / "calibrations" / "in use")
    assert lock is not None
    own.delete_old()
    assert {path.name for path in (cache / "calibrations").iterdir()} == {"young", "in use"}
    os.close(lock)


async def test_no_fault_ends_the_finder(
    config: KVFetchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "take_from_store", AsyncMock(side_effect=MemoryError))
    monkeypatch.setattr(OwnCalibration, "begin", AsyncMock(side_effect=MemoryError))
    async with Finding(config, tmp_path, weights="0" * 32) as found:
        await until(lambda: "a profile cannot be made or published here: MemoryError" in caplog.text)
        assert "for a profile failed: MemoryError" in caplog.text
        store = open_remote(config.store)
        name = await publish_profile(store, save(tmp_path), NO_KEYS)
        await store.close()
        monkeypatch.setattr(finder, "take_from_store", take_from_store)
        assert name.endswith(await found.found())


async def test_a_model_that_cannot_be_calibrated_is_not_tried_again(
    config: KVFetchConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with Finding(config, tmp_path, weights="0" * 32) as found:
        found.finder.serve(m.ShowPrompts(windows()))
        await until(lambda: found.finder._own._has_failed)
        folder = cache_folder("calibrations", "0" * 32, config.store)
        await until(lambda: not folder.exists())  # with what users have sent
        await found.finder._own.begin()
        assert found.process is None
        assert not found.events
        assert not folder.exists()
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "cannot be calibrated here" in line]
    assert "this server stores with 'exact': " in said


async def test_a_folder_that_cannot_be_written(
    model: Path, config: KVFetchConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    async with Finding(config, model) as found:
        found.finder.serve(m.ShowPrompts(windows()))
        await until(lambda: found.finder._own._has_failed)
    assert "no profile can be made in /dev/null/sgl_kvfetch/calibrations" in caplog.text
