from __future__ import annotations

import asyncio
import statistics

import aiohttp
import pytest

from benchmarks.client import CachedTokens, EventDecoder, StreamError, stream_generate
from benchmarks.conversations import Conversation, Turn
from benchmarks.load import Arrivals, Load, LoadResult, Transcript
from tests.benchmarks.fakes import FakeServer, fake_server

THREE = [Conversation((Turn((i, i), None), Turn((i,), None))) for i in (10, 20, 30)]


async def _send(
    fake: FakeServer,
    conversations: list[Conversation],
    arrivals: Arrivals,
    transcript: Transcript | None = None,
    timeout_s: float = 10.0,
) -> LoadResult:
    load = Load(fake.url, conversations, transcript or Transcript(), max_new_tokens=2, timeout_s=timeout_s)
    return await load.run(arrivals)


def test_events_in_pieces() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b'data: {"a') == []
    assert decoder.feed(b'": 1}\n\ndata: x\r\n: a comment\nda') == ['{"a": 1}', "x"]
    assert decoder.feed(b"ta: [DONE]\n") == ["[DONE]"]


@pytest.mark.parametrize("incremental", [False, True])
async def test_what_is_measured_of_a_stream(incremental: bool) -> None:
    async with fake_server(token_s=0.02, incremental=incremental) as fake, aiohttp.ClientSession() as session:
        answer = await stream_generate(session, fake.url, [7] * 40, 5)
    assert answer.output_ids == [40, 41, 42, 43, 44]
    assert answer.prompt_tokens == 40
    assert answer.cached == CachedTokens(device=3, host=2, storage=1)
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
        result = await _send(fake, THREE[:1], Arrivals(concurrency=1))
    assert fake.prompts == [[10, 10], [10, 10, 2, 3, 10]]
    assert [record.turn for record in result.records] == [0, 1]


async def test_the_first_runs_answers_stand_for_all() -> None:
    transcript = Transcript({(0, 0): [99]})
    async with fake_server() as fake:
        first = await _send(fake, THREE, Arrivals(concurrency=1), transcript)
        assert fake.prompts[1] == [10, 10, 99, 10]
        assert transcript.answers[1, 0] == [2, 3]
        second = await _send(fake, THREE, Arrivals(concurrency=3), transcript)
        other = await _send(fake, THREE, Arrivals(concurrency=3))
    assert first.prompts_digest == second.prompts_digest != other.prompts_digest


async def test_the_datasets_answers() -> None:
    conversation = Conversation((Turn((1,), (5, 6)), Turn((2,), (7,))))
    async with fake_server() as fake:
        await _send(fake, [conversation], Arrivals(concurrency=1))
    assert fake.prompts == [[1], [1, 5, 6, 2]]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_no_more_conversations_at_a_time(concurrency: int) -> None:
    async with fake_server(token_s=0.01) as fake:
        await _send(fake, THREE, Arrivals(concurrency=concurrency))
    assert fake.most_running == concurrency
    assert [prompt[0] for prompt in fake.prompts if len(prompt) == 2] == [10, 20, 30]


async def test_a_failure_ends_its_conversation_alone() -> None:
    async with fake_server(faults={10: "refuse", 20: "hang"}) as fake:
        result = await _send(fake, THREE, Arrivals(concurrency=3), timeout_s=0.3)
    errors = [record.error for record in result.records]
    assert errors[0] is not None
    assert errors[0].startswith("status 400")
    assert errors[1] == errors[3] == "not sent, because an earlier turn failed"
    assert errors[2] == "no answer within 0.3 s"
    assert errors[4:] == [None, None]


async def test_nobody_there() -> None:
    async with fake_server() as fake:
        pass
    result = await _send(fake, THREE[:1], Arrivals(concurrency=1))
    assert "Cannot connect" in (result.records[0].error or "")


def test_poisson_arrivals() -> None:
    arrivals = Arrivals(request_rate=8.0, seed=3)
    times = arrivals.start_times_s(THREE * 1000)
    assert times == arrivals.start_times_s(THREE * 1000)
    assert times != Arrivals(request_rate=8.0, seed=4).start_times_s(THREE * 1000)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    # Two turns a conversation: four conversations a second. An exponential's deviation is its mean.
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1)


async def test_poisson_arrivals_are_kept_to() -> None:
    arrivals = Arrivals(request_rate=20.0, seed=1)
    async with fake_server() as fake:
        result = await asyncio.wait_for(_send(fake, THREE, arrivals), 10)
    starts = [record.start_s for record in result.records if record.turn == 0]
    for start_s, planned_s in zip(starts, arrivals.start_times_s(THREE), strict=True):
        assert planned_s <= start_s < planned_s + 0.2
