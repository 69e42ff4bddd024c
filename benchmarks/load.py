"""Sends conversations to a server, each turn after the answer to the one before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
from xxhash import xxh3_64

from benchmarks.client import Answer, StreamError, stream_generate
from benchmarks.conversations import Conversation


@dataclass(frozen=True)
class Arrivals:
    """Either a fixed number of conversations at a time, or Poisson arrivals.

    ``request_rate`` is in requests per second. Conversations start at that rate divided by the mean number of turns,
    and send each turn as soon as the one before is answered.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.request_rate is None), "give either concurrency or request_rate"

    def start_times_s(self, conversations: Sequence[Conversation]) -> list[float]:
        """Return each conversation's start, in seconds from the run's start; all zeros without a rate."""
        if self.request_rate is None:
            return [0.0] * len(conversations)
        mean_turns = sum(len(conversation.turns) for conversation in conversations) / len(conversations)
        rng = random.Random(self.seed)
        times: list[float] = []
        for _ in conversations:
            times.append((times[-1] if times else 0.0) + rng.expovariate(self.request_rate / mean_turns))
        return times


@dataclass
class Record:
    """One request. ``error`` says why it failed or was not sent; ``answer`` is then None."""

    conversation: int
    turn: int
    start_s: float
    answer: Answer | None = None
    error: str | None = None


@dataclass
class Transcript:
    """The answers in the histories. All runs use those of the first run, so that every run sends the same prompts, even
    if a lossy cache changes the model's answers."""

    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadResult:
    """``prompts_digest`` is equal for runs that sent equal prompts."""

    records: list[Record]
    duration_s: float
    prompts_digest: str


class Load:
    """Sends conversations to one server."""

    def __init__(
        self,
        url: str,
        conversations: Sequence[Conversation],
        transcript: Transcript,
        *,
        max_new_tokens: int,
        timeout_s: float,
        api_key: str | None = None,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._conversations = conversations
        self._transcript = transcript
        self._max_new_tokens = max_new_tokens
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._on_record = on_record
        self._records: list[Record] = []
        self._digests: dict[tuple[int, int], str] = {}

    async def run(self, arrivals: Arrivals) -> LoadResult:
        """Send all conversations. A failed request ends its conversation; it raises nothing."""
        slots = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else contextlib.nullcontext()
        # No limit on connections: it would silently delay requests in this client.
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=self._timeout, headers=self._headers, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            started_s = time.perf_counter()
            for idx, start_s in enumerate(arrivals.start_times_s(self._conversations)):
                group.create_task(self._converse(session, slots, idx, started_s, start_s))
        duration_s = time.perf_counter() - started_s
        self._records.sort(key=lambda record: (record.conversation, record.turn))
        digest = xxh3_64("".join(self._digests[key] for key in sorted(self._digests)).encode())
        return LoadResult(self._records, duration_s, digest.hexdigest())

    async def _converse(
        self,
        session: aiohttp.ClientSession,
        slots: contextlib.AbstractAsyncContextManager[None],
        idx: int,
        started_s: float,
        start_s: float,
    ) -> None:
        await asyncio.sleep(max(0.0, started_s + start_s - time.perf_counter()))
        async with slots:
            history: list[int] = []
            failure: str | None = None
            for turn_idx, turn in enumerate(self._conversations[idx].turns):
                record = Record(idx, turn_idx, time.perf_counter() - started_s)
                history += turn.user_ids
                if failure is None:
                    await self._ask(session, history, record)
                    failure = record.error
                else:
                    record.error = "not sent, because an earlier turn failed"
                self._records.append(record)
                self._on_record(record)
                history += self._answer_ids(record, turn.answer_ids)

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], record: Record) -> None:
        self._digests[record.conversation, record.turn] = xxh3_64(repr(prompt).encode()).hexdigest()
        try:
            record.answer = await stream_generate(session, self._url, prompt, self._max_new_tokens)
        except TimeoutError:
            record.error = f"no answer within {self._timeout.total:g} s"
        except (StreamError, aiohttp.ClientError) as e:
            record.error = str(e) or type(e).__name__

    def _answer_ids(self, record: Record, dataset_ids: Sequence[int] | None) -> Sequence[int]:
        if dataset_ids is not None:
            return dataset_ids
        key = (record.conversation, record.turn)
        if record.answer is not None:
            self._transcript.answers.setdefault(key, record.answer.output_ids)
        return self._transcript.answers.get(key, [])
