"""All ranks of an engine take one profile, or none of them starts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane import KVFetchConfig, TakenProfile
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plugin import profiles
from sgl_kvfetch.plugin.namespace import engine_profile
from sgl_kvfetch.plugin.profiles import Alone, with_profile

WEIGHTS = "0" * 32
CONFIG = parse_config({"store": "file:///kv", "quantiser": "klt"}, {})


class Group:
    """One rank of several, each on a thread, with SGLang's collective."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank_in_group = rank
        self._shared = shared
        self._barrier = barrier

    def all_gather_object(self, mine: Any) -> list[Any]:
        self._shared[self.rank_in_group] = mine
        self._barrier.wait(WAIT_S)
        found = list(self._shared)
        self._barrier.wait(WAIT_S)
        return found


def run_ranks(size: int) -> list[str]:
    """Return the path that each rank takes, or its error."""
    shared, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> str:
        try:
            return str(with_profile(CONFIG, WEIGHTS, "model", Group(rank, shared, barrier)).profile)
        except ConfigError as e:
            return str(e)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_all_ranks_take_what_the_first_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def take(config: KVFetchConfig, weights: str, digest: str | None = None) -> TakenProfile:
        asked.append(digest)
        return TakenProfile(f"/copies/{digest or 'newest'}", digest or "newest", "")

    monkeypatch.setattr(profiles, "take_profile", take)
    assert run_ranks(3) == ["/copies/newest"] * 3
    assert asked == [None, "newest", "newest"]


@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("is_down", [True, False])
def test_no_rank_starts_without_the_others(monkeypatch: pytest.MonkeyPatch, fails: int, is_down: bool) -> None:
    """Rank 0 asks for the newest, and the others for what it has chosen; the last one fails."""
    num_asked = 0
    lock = threading.Lock()

    def take(config: KVFetchConfig, weights: str, digest: str | None = None) -> TakenProfile | None:
        nonlocal num_asked
        with lock:
            number, num_asked = num_asked, num_asked + 1
        if number != fails:
            return TakenProfile("/copy", "d", "")
        if is_down:
            raise ConfigError("the store is down")
        return None

    monkeypatch.setattr(profiles, "take_profile", take)
    messages = set(run_ranks(3))
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("the store is down" if is_down else ("quantiser = 'klt' needs" if not fails else "rank "))


def test_without_a_profile_the_message_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "take_profile", lambda *_: None)
    with pytest.raises(ConfigError, match="kvfetch calibrate --model /llama --text FILE --publish file:///kv, or set"):
        with_profile(CONFIG, WEIGHTS, "/llama", Alone())


def test_a_model_id_needs_a_file() -> None:
    with pytest.raises(ConfigError, match="stores keep profiles by the fingerprint of the weights, which model_id"):
        engine_profile(CONFIG.model_copy(update={"model_id": "mine"}))
    named = CONFIG.model_copy(update={"model_id": "mine", "profile": "p"})
    assert engine_profile(named) is named
