from __future__ import annotations

import statistics

import aiohttp
import pytest

from benchmarks.client import StreamError, stream_generate
from benchmarks.sharegpt.conversations import Conversation
from benchmarks.sharegpt.load import Load, Result, Transcript, poisson_starts_s
from tests.benchmarks.fakes import FakeServer, fake_server

THREE: list[Conversation] = [((i, i), (i,)) for i in (10, 20, 30)]


async def _send(
    fake: FakeServer,
    conversations: list[Conversation],
    concurrency: int,
    transcript: Transcript | None = None,
    timeout_s: float = 10.0,
) -> Result:
    load = Load(
        fake.url, conversations, {} if transcript is None else transcript, max_new_tokens=2, timeout_s=timeout_s
    )
    return await load.run(concurrency=concurrency)


@pytest.mark.parametrize("incremental", [False, True])
async def test_what_is_measured_of_a_stream(incremental: bool) -> None:
    async with fake_server(token_s=0.02, incremental=incremental) as fake, aiohttp.ClientSession() as session:
        answer = await stream_generate(session, fake.url, [7] * 40, 5)
    assert answer.output_ids == [40, 41, 42, 43, 44]
    assert answer.prompt_tokens == 40
    assert answer.cached == {"device": 3, "host": 2, "storage": 1}
    assert answer.ttft_s >= 0.02
    assert len(answer.itl_s) == 4
    assert answer.e2e_s == pytest.approx(answer.ttft_s + sum(answer.itl_s))
    assert answer.tpot_s == pytest.approx(statistics.mean(answer.itl_s))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "status 400: .*too long"),
        ("abort", "aborted the request: out of memory"),
        ("cut", "ended after 1 of 3 tokens"),
    ],
)
async def test_what_goes_wrong_is_said(fault: str, message: str) -> None:
    async with fake_server(faults={1: fault}) as fake, aiohttp.ClientSession() as session:
        with pytest.raises(StreamError, match=message):
            await stream_generate(session, fake.url, [1], 3)


async def test_later_prompts_repeat_what_came_before() -> None:
    async with fake_server() as fake:
        result = await _send(fake, THREE[:1], 1)
    assert fake.prompts == [[10, 10], [10, 10, 2, 3, 10]]
    assert [record.turn for record in result.records] == [0, 1]


async def test_the_first_runs_answers_stand_for_all() -> None:
    transcript: Transcript = {(0, 0): [99]}
    async with fake_server() as fake:
        first = await _send(fake, THREE, 1, transcript)
        assert fake.prompts[1] == [10, 10, 99, 10]
        assert transcript[1, 0] == [2, 3]
        second = await _send(fake, THREE, 3, transcript)
        other = await _send(fake, THREE, 3)
    assert first.prompts_digest == second.prompts_digest != other.prompts_digest


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_no_more_conversations_at_a_time(concurrency: int) -> None:
    async with fake_server(token_s=0.01) as fake:
        await _send(fake, THREE, concurrency)
    assert fake.most_running == concurrency
    assert [prompt[0] for prompt in fake.prompts if len(prompt) == 2] == [10, 20, 30]


async def test_a_failure_ends_its_conversation_alone() -> None:
    async with fake_server(faults={10: "refuse", 20: "hang"}) as fake:
        result = await _send(fake, THREE, 3, timeout_s=0.3)
    errors = [record.error for record in result.records]
    assert errors[0] is not None
    assert errors[0].startswith("status 400")
    assert errors[1] == errors[3] == "not sent, because an earlier turn failed"
    assert errors[2] == "no answer within 0.3 s"
    assert errors[4:] == [None, None]


def test_poisson_arrivals() -> None:
    times = poisson_starts_s(THREE * 1000, 8.0, seed=3)
    assert times == poisson_starts_s(THREE * 1000, 8.0, seed=3)
    assert times != poisson_starts_s(THREE * 1000, 8.0, seed=4)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    # Two turns a conversation: four conversations a second. An exponential's deviation is its mean.
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1)


async def test_conversations_start_when_they_are_due() -> None:
    starts_s = [0.1, 0.0, 0.2]
    async with fake_server() as fake:
        result = await Load(fake.url, THREE, {}, max_new_tokens=2, timeout_s=10.0).run(starts_s=starts_s)
    for record in result.records:
        assert record.start_s >= starts_s[record.conversation]
