"""Sends conversations to a server, each turn after the answer to the one before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from xxhash import xxh3_64

from benchmarks.sharegpt.conversations import Conversation
from sgl_kvfetch.tools.sglang_server import StreamedAnswer, StreamError, stream_generate

# By conversation and turn: the answers in the histories. All runs repeat those of the first run, so that every run
# sends the same prompts, even if a lossy cache changes the model's answers.
Transcript = dict[tuple[int, int], list[int]]


@dataclass
class Record:
    """One request. ``error`` says why it failed or was not sent; ``answer`` is then None."""

    conversation: int
    turn: int
    start_s: float
    answer: StreamedAnswer | None = None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """``prompts_digest`` is equal for runs that sent equal prompts."""

    records: list[Record]
    duration_s: float
    prompts_digest: str

    @property
    def storage_tokens(self) -> int:
        """Return how many prompt tokens came from storage."""
        return sum(record.answer.cached["storage"] for record in self.records if record.answer is not None)


def poisson_starts_s(conversations: Sequence[Conversation], request_rate: float, seed: int) -> list[float]:
    """Return each conversation's start, in seconds from the run's start, for a mean of ``request_rate`` requests per
    second. Conversations send each turn as soon as the one before is answered."""
    rate = request_rate * len(conversations) / sum(map(len, conversations))
    rng, starts = random.Random(seed), [0.0]
    for _ in conversations:
        starts.append(starts[-1] + rng.expovariate(rate))
    return starts[1:]


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
        on_record: Callable[[], object] = lambda: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._conversations = conversations
        self._transcript = transcript
        self._max_new_tokens = max_new_tokens
        self._timeout_s = timeout_s
        self._on_record = on_record
        self._records: dict[tuple[int, int], Record] = {}
        self._prompts: dict[tuple[int, int], bytes] = {}

    async def run(self, *, concurrency: int | None = None, starts_s: Sequence[float] | None = None) -> Result:
        """Send all conversations, ``concurrency`` at a time or each at its start. A failed request ends its
        conversation; it raises nothing."""
        slots = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        began_s = time.perf_counter()
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                connector=aiohttp.TCPConnector(limit=0),  # a limit would silently delay requests in this client
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for idx, start_s in enumerate(starts_s or [0.0] * len(self._conversations)):
                group.create_task(self._converse(session, slots, idx, began_s, start_s))
        duration_s = time.perf_counter() - began_s
        digest = xxh3_64(b"".join(self._prompts[key] for key in sorted(self._prompts)))
        return Result([self._records[key] for key in sorted(self._records)], duration_s, digest.hexdigest())

    async def _converse(
        self,
        session: aiohttp.ClientSession,
        slots: contextlib.AbstractAsyncContextManager[None],
        idx: int,
        began_s: float,
        start_s: float,
    ) -> None:
        await asyncio.sleep(max(0.0, began_s + start_s - time.perf_counter()))
        async with slots:
            history: list[int] = []
            has_failed = False
            for turn, user_ids in enumerate(self._conversations[idx]):
                record = self._records[idx, turn] = Record(idx, turn, time.perf_counter() - began_s)
                if has_failed:
                    record.error = "not sent, because an earlier turn failed"
                else:
                    history += user_ids
                    await self._ask(session, history, record)
                has_failed = record.error is not None
                self._on_record()
                if record.answer is not None:
                    history += self._transcript.setdefault((idx, turn), record.answer.output_ids)

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], record: Record) -> None:
        self._prompts[record.conversation, record.turn] = xxh3_64(repr(prompt).encode()).digest()
        try:
            record.answer = await stream_generate(session, self._url, prompt, self._max_new_tokens)
        except TimeoutError:
            record.error = f"no answer within {self._timeout_s:g} s"
        except (StreamError, aiohttp.ClientError) as e:
            record.error = str(e) or type(e).__name__
