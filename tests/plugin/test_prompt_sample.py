"""Which prompts an engine's sample takes, and what of them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvfetch.plugin.auto_profile import AutoProfile, PromptSample
from sgl_kvfetch.prompts import NUM_WINDOWS

WINDOW = 1536


def tokens(piece: bytes) -> list[int]:
    return memoryview(piece).cast("i").tolist()


def prompt(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_a_window_is_what_was_computed_of_a_prompt() -> None:
    sample = PromptSample(num_windows=2)
    system = prompt(0, 1000)
    sample.add("a", [*system, *prompt(10_000, 2000)], 0, 3000)
    sample.add("a", [*system, *prompt(10_000, 2000)], 1536, 1464)  # its next chunk
    assert not sample.is_full
    sample.add("b", [*system, *prompt(20_000, 2000)], 1000, 2000)  # begins alike
    assert sample.is_full
    sample.add("c", prompt(30_000, 2000), 0, 2000)
    (first,), (second,) = sample.take_windows()
    assert tokens(first) == [*system, *prompt(10_000, 536)]
    assert tokens(second) == prompt(20_000, WINDOW)


def test_short_prompts_are_joined() -> None:
    sample = PromptSample(num_windows=1)
    sample.add("tiny", prompt(0, 63), 0, 63)
    sample.add("again", prompt(1000, 800), 0, 800)
    sample.add("same", prompt(1000, 800), 0, 800)
    sample.add("other", prompt(3000, 750), 0, 750)
    assert not sample.is_full  # a window that loses BOS twice must still be whole
    sample.add("last", prompt(5000, 64), 0, 64)
    ((*pieces,),) = sample.take_windows()
    assert [tokens(piece) for piece in pieces] == [prompt(1000, 800), prompt(3000, 750), prompt(5000, 64)]


def request(rid: str, first: int, **changes: Any) -> SimpleNamespace:
    kept_apart = {"cache_salt": None, "extra_key": None, "multimodal_inputs": None}
    return SimpleNamespace(rid=rid, origin_input_ids=prompt(first, 1600), **kept_apart | changes)


@pytest.mark.parametrize("change", [{}, {"cache_salt": "t"}, {"extra_key": "k"}, {"multimodal_inputs": object()}])
def test_prompts_that_are_kept_apart_are_left_out(change: dict[str, Any]) -> None:
    sample = PromptSample(num_windows=1)
    decoding = request("d", 0)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    batch = SimpleNamespace(
        forward_mode=mode,
        reqs=[decoding, request("p", 10_000, **change)],
        decoding_reqs=[decoding],
        prefix_lens=[1599, 0],
        extend_lens=[1, 1600],
    )
    sample.add_batch(batch)
    assert sample.is_full == (not change)


def test_the_log_says_how_far_the_sample_is(caplog: pytest.LogCaptureFixture) -> None:
    """A server with few prompts takes hours for it."""
    caplog.set_level(logging.INFO)
    shown: list[Any] = []
    plane: Any = SimpleNamespace(show_prompts=shown.append)
    profile = AutoProfile(plane, 0, 1, None, pauses=False)
    for number in range(NUM_WINDOWS):
        mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
        reqs = [request(str(number), 2000 * number)]
        profile.batch_ended(
            SimpleNamespace(forward_mode=mode, reqs=reqs, prefix_lens=[0], extend_lens=[1600], decoding_reqs=None)
        )
    said = [record.getMessage() for record in caplog.records if "windows of 1536 tokens" in record.getMessage()]
    assert [line.partition("has ")[2].partition(" of")[0] for line in said] == ["5", "10", "15", "20", "25"]
    assert len(shown) == 1
