"""All ranks of an engine take one profile, or none of them starts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.errors import ConfigError, KVFetchError, StoreError, UnsupportedError
from sgl_kvfetch.plugin.identity import Alone, TakeProfile, engine_config, with_profile
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.protocol.messages import ProfileNeeds, TakenProfile, Watch
from sgl_kvfetch.types import KVGeometry

CONFIG = parse_config({"store": "http://kv", "quantiser": "klt"})
NEEDS = ProfileNeeds(KVGeometry(1, 1, 64, 64, 16, "bfloat16"), (0,), 0, 0, 1)
WATCH = Watch("0" * 32, "/model", "model", NEEDS)


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


def run_ranks(size: int, take: TakeProfile) -> list[str]:
    shared, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> str:
        try:
            found = with_profile(CONFIG, WATCH, "model", Group(rank, shared, barrier), take)
            return found.profile or found.quantiser_name
        except ConfigError as e:
            return str(e)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_all_ranks_take_what_the_first_has_chosen() -> None:
    asked: list[str | None] = []

    def take(_config: object, _watch: Watch, digest: str | None = None) -> TakenProfile:
        asked.append(digest)
        return TakenProfile(f"/copies/{digest or 'newest'}", digest or "newest", "")

    assert run_ranks(3, take) == ["/copies/newest"] * 3
    assert asked == [None, "newest", "newest"]


@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (ConfigError("no room for copies"), ("no room for copies", "no room for copies")),
        (StoreError("refused", "the store is down"), ("exact", "exact")),
        (None, ("quantiser = 'klt' needs a profile", "rank ")),
    ],
)
def test_no_rank_goes_its_own_way(fails: int, fault: KVFetchError | None, expected: tuple[str, str]) -> None:
    """Rank 0 asks for the newest, and the others for what it has chosen; the last one fails."""
    num_asked = 0
    lock = threading.Lock()

    def take(*_: object) -> TakenProfile | None:
        nonlocal num_asked
        with lock:
            number, num_asked = num_asked, num_asked + 1
        if number != fails:
            return TakenProfile("/copy", "d", "")
        if fault is not None:
            raise fault
        return None

    (result,) = set(run_ranks(3, take))
    assert result.startswith(expected[fails > 0])


def test_auto_is_klt_with_a_profile_and_exact_without() -> None:
    given = {"store": "http://kv", "target_kl": 1e-3, "token_file": "t"}
    auto = parse_config(given | {"quantiser": "auto", "levels": {}, "codec": "ans"})
    found = with_profile(auto, WATCH, "model", Alone(), lambda *_: TakenProfile("/copy", "d", ""))
    assert found == parse_config(given | {"quantiser": "klt", "levels": {}, "codec": "ans", "profile": "/copy"})
    without = with_profile(auto, WATCH, "model", Alone(), lambda *_: None)
    assert without == parse_config({"store": "http://kv", "quantiser": "exact", "token_file": "t"})
    assert KVFetchConfig.model_validate(without.model_dump(mode="json", exclude_unset=True)) == without


def test_auto_stays_exact_where_klt_cannot_be_had(caplog: pytest.LogCaptureFixture) -> None:
    why = "quantiser 'klt' does not support draft models: use 'exact' or 'uint8'"
    auto = CONFIG.model_copy(update={"quantiser": "auto"})
    assert engine_config(auto, why, Mock(), Mock()).quantiser_name == "exact"
    assert why in caplog.text
    with pytest.raises(UnsupportedError, match="does not support draft models"):
        engine_config(CONFIG, why, Mock(), Mock())


def test_a_model_id_needs_a_file() -> None:
    with pytest.raises(ConfigError, match="stores keep profiles by the fingerprint of the weights, which model_id"):
        engine_config(CONFIG.model_copy(update={"model_id": "mine"}), "", Mock(), Mock())
    named = CONFIG.model_copy(update={"model_id": "mine", "profile": "p"})
    assert engine_config(named, "", Mock(), Mock()) is named
