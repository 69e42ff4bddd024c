"""All ranks of an engine go over to one profile in the same step. It is made of a sample of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from sgl_kvfetch.plugin import auto_profile
from sgl_kvfetch.plugin.auto_profile import AutoProfile, PromptSample

DIGEST = "0123456789abcdef00000000ffffffff"


@pytest.fixture
def plane() -> Iterator[Mock]:
    """Return a data plane that finds a profile when it is told to."""
    yield Mock(found_profile="", is_closing=False)
    auto_profile.end()


def scheduler(*, is_idle: bool) -> Any:
    return SimpleNamespace(is_fully_idle=lambda for_health_check: is_idle)


@pytest.mark.parametrize("can_switch", [True, False])
def test_one_rank_switches_once_if_it_can(plane: Mock, caplog: pytest.LogCaptureFixture, can_switch: bool) -> None:
    """Device mode on a GPU cannot."""
    caplog.set_level("INFO")
    follow: Any = (lambda digest: digest) if can_switch else None
    auto_profile.begin(one := AutoProfile(plane, 0, 1, follow, pauses=False))
    one.step(scheduler(is_idle=False))
    assert auto_profile.current() is one
    plane.found_profile = DIGEST
    one.step(scheduler(is_idle=False))
    assert auto_profile.current() is None
    assert [made.args[0]() for made in plane.switch.call_args_list] == ([DIGEST] if can_switch else [])
    told = f"the store has profile {DIGEST}; device mode on a GPU stores with it once the backend is"
    assert (told in caplog.text) is not can_switch


def test_calibrating_pauses_while_an_engine_on_the_cpu_has_requests(plane: Mock) -> None:
    auto_profile.begin(one := AutoProfile(plane, 0, 1, None, pauses=True))
    for is_idle in (True, False, False, True, True):
        one.step(scheduler(is_idle=is_idle))
    assert plane.pause_calibration.call_args_list == [call(is_paused=True), call(is_paused=False)]
    plane.is_closing = True  # the backend is detached
    assert auto_profile.current() is None


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
    assert tokens(second) == prompt(20_000, 1536)


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


@pytest.mark.parametrize("change", [{}, {"cache_salt": "t"}, {"extra_key": "k"}, {"multimodal_inputs": object()}])
def test_prompts_that_are_kept_apart_are_left_out(change: dict[str, Any]) -> None:
    def request(rid: str, first: int, **changes: Any) -> SimpleNamespace:
        kept_apart = {"cache_salt": None, "extra_key": None, "multimodal_inputs": None}
        return SimpleNamespace(rid=rid, origin_input_ids=prompt(first, 1600), **kept_apart | changes)

    sample, decoding = PromptSample(num_windows=1), request("d", 0)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        reqs=[decoding, request("p", 10_000, **change)],
        decoding_reqs=[decoding],
        prefix_lens=[1599, 0],
        extend_lens=[1, 1600],
    )
    sample.add_batch(batch)
    assert sample.is_full == (not change)
