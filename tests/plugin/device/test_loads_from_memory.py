"""Prompts that are in `memory_cache` are loaded from where they lie: no byte is read or verified again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.serving import serving
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.engine import process
from sgl_kvfetch.errors import StoreError
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
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells that the data plane verifies."""
    seen, verified_cell = list[Any](), SegmentReader.verified_cell

    def noted(self: SegmentReader, cell: Any, *args: Any) -> Any:
        seen.append(cell)
        return verified_cell(self, cell, *args)

    monkeypatch.setattr(SegmentReader, "verified_cell", noted)
    return seen


def with_memory(make: MakeRig, memory_cache: str = "1MiB", **config: Any) -> Rig:
    return reader(make, memory_cache=memory_cache, **config)


def is_in_memory(rig: Rig, chunks: np.ndarray) -> np.ndarray:
    """Return which chunks lie in the cache."""
    found: np.ndarray = chunks["start"] >= rig.service._prompts.room.num_bytes
    return found


def test_a_prompt_that_was_read_before_is_loaded_without_a_read_or_a_check(make: MakeRig, verified: list[Any]) -> None:
    expected = written(make, TOKENS)
    rig = with_memory(make)
    verified.clear()
    assert_close(loaded(rig, TOKENS), expected)
    assert len(verified) == 16  # two layer groups and two heads of four spans
    assert rig.store.data_reads
    rig.evict()
    verified.clear()
    rig.store.data_reads.clear()
    for _ in range(2):
        request, chunks = staged(rig, TOKENS)
        assert is_in_memory(rig, chunks).all()
        assert_close(loaded(rig, TOKENS, request), expected)
        rig.evict()
    assert not verified
    assert not rig.store.data_reads


def test_a_prompt_that_was_written_is_checked_once(make: MakeRig, verified: list[Any], tmp_path: Path) -> None:
    expected = written(make, TOKENS)
    with serving(tmp_path / "other") as other:
        rig = with_memory(make, mode="read_write", store=other)
        rig.compute(TOKENS)
        rig.write_all()
        rig.store.lookups.error = rig.store.reads.error = StoreError("io", "the network is down")
        for num_verified in (16, 0, 0):
            rig.evict()
            verified.clear()
            assert_close(loaded(rig, TOKENS), expected)
            assert len(verified) == num_verified


def test_prompts_in_memory_do_not_say_that_the_store_works(make: MakeRig) -> None:
    for tokens in (TOKENS, other := prompt(1, NUM_PAGES)):
        written(make, tokens)
    rig = with_memory(make)
    left(rig, rig.arrive_staged(TOKENS))
    rig.store.reads.error = StoreError("io", "a disk does not answer")
    for _ in range(3):
        left(rig, rig.arrive_staged(other))
        left(rig, rig.arrive_staged(TOKENS))
    assert rig.service.client.finder.is_paused


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
    ("memory_cache", "is_beside", "most_s"), [("1MiB", True, NO_WORD_S), ("1MiB", False, 0.0), ("", True, 0.0)]
)
def test_no_step_waits_for_the_store(
    memory_cache: str, is_beside: bool, most_s: float, make: MakeRig, waits: list[float]
) -> None:
    """``most_s``: for its word."""
    written(make, TOKENS)
    rig = with_memory(make, memory_cache)
    rig.store.reads.is_open = False
    request = rig.arrive(TOKENS)
    rig.linker._stepped_s = -math.inf
    waits.clear()
    rig.linker.step(rig.cache, lambda: 0, is_beside=is_beside)
    assert max(waits, default=0.0) <= most_s
    assert rig.is_parked(request)


def test_what_does_not_fit_is_loaded_from_staging(make: MakeRig, verified: list[Any]) -> None:
    expected = written(make, TOKENS)
    whole = with_memory(make)
    _, chunks = staged(whole, TOKENS)
    rig = with_memory(make, f"{int(chunks['size'].sum() * 0.8)}B")
    for _ in range(2):
        request, chunks = staged(rig, TOKENS)
        is_here = is_in_memory(rig, chunks)
        assert 0 < is_here.sum() < len(chunks)
        assert_close(loaded(rig, TOKENS, request), expected)
        rig.evict()
    verified.clear()
    staged(rig, TOKENS)
    assert 0 < len(verified) < 16
    rig.flush()


@pytest.mark.parametrize("is_flushed", [False, True], ids=["others need the memory", "caches are emptied"])
def test_what_is_held_in_memory_stays_until_it_is_loaded(is_flushed: bool, make: MakeRig) -> None:
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
    rig.store.data_reads.clear()
    assert_close(loaded(rig, TOKENS), expected[0])
    assert rig.store.data_reads or not is_flushed


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
    make: MakeRig, verified: list[Any], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0f" * 32)
    expected = written(make, TOKENS, key_file=str(key))
    rig = with_memory(make, key_file=str(key))
    assert_close(loaded(rig, TOKENS), expected)
    rig.evict()
    verified.clear()
    rig.store.data_reads.clear()
    request, chunks = staged(rig, TOKENS)
    assert not is_in_memory(rig, chunks).any()
    assert len(verified) == 16
    assert not rig.store.data_reads
    assert_close(loaded(rig, TOKENS, request), expected)


def test_cells_that_the_gpu_decodes_wrongly_are_read_again_and_decoded_by_the_cpu(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
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
        rig.store.data_reads.clear()
        request = rig.arrive_staged(TOKENS)
        assert code_of(rig, request) is None
        assert_close(loaded(rig, TOKENS, request), expected)
        assert bool(rig.store.data_reads) == is_read
        rig.evict()
