"""Prompts that are in `memory_cache` are loaded from where they lie: no byte is read, copied or verified again."""

from __future__ import annotations

import math
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from harness.metrics import own_metric
from harness.serving import serving
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.engine import process
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.fetch.reads import UnitReader
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plugin.device import gpu_loads, linker
from sgl_kvfetch.protocol import quantiser as quantisers
from sgl_kvfetch.protocol.messages import Channel
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.gpu_models import (
    assert_close,
    code_of,
    decode_wrongly,
    left,
    loaded,
    reader,
    staged,
    use_small_model,
    written,
)
from tests.plugin.device.rig import Rig, prompt
from tests.reasons import assert_counted

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NO_WORD_S = 0.01
NUM_PAGES = 16  # in four spans
TOKENS = prompt(0, NUM_PAGES)


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_model(monkeypatch)
    monkeypatch.setattr(quantisers, "SPAN_TOKENS", 16)
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes the data plane reads, how many units it copies, and how many cells it verifies."""
    done = Counter[str]()
    transmit, copy, verified = UnitReader._transmit, MemoryCache._copy, SegmentReader.verified_cell

    async def count_transmit(self: UnitReader, unit: Any, *args: Any) -> None:
        done["read"] += unit.size_bytes
        await transmit(self, unit, *args)

    def count_copy(*args: Any) -> Any:
        done["copied"] += 1
        return copy(*args)

    def count_verified(*args: Any) -> Any:
        done["verified"] += 1
        return verified(*args)

    monkeypatch.setattr(UnitReader, "_transmit", count_transmit)
    monkeypatch.setattr(MemoryCache, "_copy", count_copy)
    monkeypatch.setattr(SegmentReader, "verified_cell", count_verified)
    return done


def with_memory(make: MakeRig, memory_cache: str = "1MiB", **config: Any) -> Rig:
    return reader(make, memory_cache=memory_cache, **config)


def is_in_memory(rig: Rig, chunks: np.ndarray) -> np.ndarray:
    """Return which chunks lie in the cache."""
    found: np.ndarray = chunks["start"] >= rig.service._prompts.room.num_bytes
    return found


def test_a_prompt_that_was_read_before_is_loaded_without_a_read_a_copy_or_a_check(
    make: MakeRig, work: Counter[str], tmp_path: Path
) -> None:
    with serving(tmp_path / "served") as url:
        expected = written(make, TOKENS, store=url)
        rig = with_memory(make, store=url)
        work.clear()
        read_before = own_metric("sgl_kvfetch_wire_bytes_total", direction="read")
        assert_close(loaded(rig, TOKENS), expected)
        assert (work["copied"], work["verified"]) == (0, 16)  # two layer groups and two heads of four spans
        assert work["read"] == own_metric("sgl_kvfetch_wire_bytes_total", direction="read") - read_before > 0
        rig.evict()
        for _ in range(2):
            work.clear()
            hits_before = own_metric("sgl_kvfetch_memory_cache_read_bytes_total")
            request, chunks = staged(rig, TOKENS)
            assert is_in_memory(rig, chunks).all()
            assert own_metric("sgl_kvfetch_memory_cache_read_bytes_total") - hits_before > chunks["size"].sum()
            assert_close(loaded(rig, TOKENS, request), expected)
            assert not work
            rig.evict()


def test_a_prompt_that_was_written_is_checked_once(make: MakeRig, work: Counter[str], tmp_path: Path) -> None:
    expected = written(make, TOKENS)
    with serving(tmp_path / "other") as other:
        rig = with_memory(make, mode="read_write", store=other)
        rig.compute(TOKENS)
        rig.write_all()
        rig.store.lookups.error = rig.store.reads.error = StoreError("io", "the network is down")
        for num_verified in (16, 0, 0):
            rig.evict()
            work.clear()
            assert_close(loaded(rig, TOKENS), expected)
            assert work == Counter(verified=num_verified)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each look for answers may wait. Words and pages take as long as they like, but for `NO_WORD_S`."""
    seen, receive = list[float](), Channel.receive_staged

    def noted(self: Channel, timeout_s: float = 0.0) -> Any:
        seen.append(timeout_s)
        return receive(self, timeout_s)

    monkeypatch.setattr(Channel, "receive_staged", noted)
    monkeypatch.setattr(linker, "_NEAR_S", WAIT_S)
    monkeypatch.setattr(process, "_WORD_S", NO_WORD_S)
    return seen


def test_a_prompt_in_memory_is_there_in_the_step_after_its_arrival(
    make: MakeRig, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang makes a step in each forward pass, so one more would be a pass more."""
    expected = written(make, TOKENS)
    rig = with_memory(make)
    request, _ = staged(rig, TOKENS)
    left(rig, request)
    monkeypatch.setattr(process, "_WORD_S", WAIT_S)
    request = rig.arrive(TOKENS)
    assert rig.is_parked(request)
    rig.linker._stepped_s = -math.inf
    receive = Channel.receive_staged
    with monkeypatch.context() as slow:  # no answer has come before the step begins to wait
        slow.setattr(Channel, "receive_staged", lambda self, wait_s=0.0: receive(self, wait_s) if wait_s else [])
        rig.linker.step(rig.cache, lambda: 0, is_beside=True)
    assert not rig.is_parked(request)
    assert max(waits) > NO_WORD_S
    assert_close(loaded(rig, TOKENS, request), expected)


@pytest.mark.parametrize(
    ("memory_cache", "is_beside", "last_s", "most_s"),
    [
        ("1MiB", True, math.inf, NO_WORD_S),
        ("1MiB", True, NO_WORD_S, NO_WORD_S / 2),
        ("1MiB", False, math.inf, 0.0),
        ("", True, math.inf, 0.0),
    ],
)
def test_no_step_waits_for_the_store(
    memory_cache: str, is_beside: bool, last_s: float, most_s: float, make: MakeRig, waits: list[float]
) -> None:
    """``most_s``: for its word. Nor does a step wait for what an earlier one has not waited for."""
    written(make, TOKENS)
    rig = with_memory(make, memory_cache)
    rig.store.reads.is_open = False
    request = rig.arrive(TOKENS)
    for of_step in ([0.0, most_s], [0.0]):
        waits.clear()
        rig.linker._stepped_s = 100.0 - last_s
        with patch.object(linker, "time", SimpleNamespace(monotonic=lambda: 100.0)):
            rig.linker.step(rig.cache, lambda: 0, is_beside=is_beside)
        assert all(wait_s <= most for wait_s, most in zip_longest(waits, of_step, fillvalue=of_step[-1]))
    assert rig.is_parked(request)
    rig.store.reads.is_open = True
    rig.await_unparked(request)
    left(rig, request)


def test_what_does_not_fit_is_loaded_from_staging(make: MakeRig, work: Counter[str]) -> None:
    expected = written(make, TOKENS)
    whole = with_memory(make)
    _, chunks = staged(whole, TOKENS)
    rig = with_memory(make, f"{int(chunks['size'].sum() * 0.8)}B")
    for _ in range(2):
        request, chunks = staged(rig, TOKENS)
        is_here = is_in_memory(rig, chunks)
        assert 0 < is_here.sum() < len(chunks)
        code = code_of(rig, request)
        assert code is not None
        assert is_here[code.cells["first_token"] == 0].all()
        assert_close(loaded(rig, TOKENS, request), expected)
        rig.evict()
    work.clear()
    staged(rig, TOKENS)
    assert 0 < work["verified"] < 16
    rig.flush()


@pytest.mark.parametrize("is_flushed", [False, True], ids=["others need the memory", "caches are emptied"])
def test_what_is_held_in_memory_stays_until_it_is_loaded(is_flushed: bool, make: MakeRig, work: Counter[str]) -> None:
    others = [prompt(seed, NUM_PAGES) for seed in range(1, 4)]
    expected = [written(make, tokens) for tokens in (TOKENS, *others)]
    _, chunks = staged(with_memory(make), TOKENS)
    rig = with_memory(make, f"{int(chunks['size'].sum() * 1.5)}B")
    request, chunks = staged(rig, TOKENS)
    assert is_in_memory(rig, chunks).all()
    if is_flushed:
        rig.parts.plane.flush()
        rig.hear_plane()
    else:
        for tokens, theirs in zip(others, expected[1:], strict=True):
            assert_close(loaded(rig, tokens), theirs)
    assert_close(loaded(rig, TOKENS, request), expected[0])
    rig.evict()
    work.clear()
    assert_close(loaded(rig, TOKENS), expected[0])
    assert bool(work["read"]) or not is_flushed


def test_a_request_that_leaves_while_its_prompt_is_read_leaves_memory_to_others(make: MakeRig) -> None:
    expected = written(make, TOKENS)
    rig = with_memory(make)
    rig.store.reads.is_open = False
    request = rig.arrive(TOKENS)
    rig.settle(lambda: rig.store.reads.num_waiting > 0)
    left(rig, request)
    rig.store.reads.is_open = True
    rig.assert_nothing_held()
    assert_close(loaded(rig, TOKENS), expected)
    rig.evict()
    _, chunks = staged(rig, TOKENS)
    assert is_in_memory(rig, chunks).all()


def test_what_is_encrypted_stays_so_and_is_decrypted_each_time(
    make: MakeRig, work: Counter[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0f" * 32)
    expected = written(make, TOKENS, key_file=str(key))
    rig = with_memory(make, key_file=str(key))
    assert_close(loaded(rig, TOKENS), expected)
    rig.evict()
    work.clear()
    request, chunks = staged(rig, TOKENS)
    assert not is_in_memory(rig, chunks).any()
    assert work == Counter(verified=16)
    assert_close(loaded(rig, TOKENS, request), expected)


def test_cells_that_the_gpu_decodes_wrongly_are_read_again_and_decoded_by_the_cpu(
    make: MakeRig, work: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose request is aborted."""
    expected = written(make, TOKENS)
    rig = with_memory(make)
    monkeypatch.setattr(gpu_loads, "ans_decode_table", decode_wrongly)
    request, _ = staged(rig, TOKENS)
    with assert_counted("load", Reason.CORRUPT):
        rig.admit(request)
    assert request.discard_output_reason is not None
    rig.hear_plane()
    for is_read in (True, False):
        work.clear()
        request = rig.arrive_staged(TOKENS)
        assert code_of(rig, request) is None
        assert_close(loaded(rig, TOKENS, request), expected)
        assert bool(work["read"]) == is_read
        rig.evict()
