"""Sends conversations to a server, each turn after the answer to the one before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from xxhash import xxh3_64

from benchmarks.sharegpt.conversations import Conversation
from sgl_kvfetch.tools.sglang_server import TIERS, PromptMeta

_SAID_CHARS = 500
_LINE_BYTES = 1 << 20  # an event repeats all of its answer's tokens

# By conversation and turn: the answers in the histories. All runs repeat those of the first run, so that every run
# sends the same prompts, even if a lossy cache changes the model's answers.
Transcript = dict[tuple[int, int], list[int]]


class StreamError(Exception):
    """The server refused or aborted a request. The message holds the server's answer."""


@dataclass
class StreamedAnswer:
    """``ttft_s`` is the time from sending to the first token. ``itl_s`` holds the gap before each later token; tokens
    of one event share the gap before it. ``cached``: the prompt's tokens that were not computed, by tier."""

    output_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per later token, or None if there is none."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    def add(self, event: dict[str, Any], since_s: float) -> None:
        """Add a stream's event that arrived ``since_s`` after sending. Raises StreamError if the request failed."""
        if "error" in event:
            raise StreamError(f"the server answered: {json.dumps(event['error'])[:_SAID_CHARS]}")
        meta = event["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise StreamError(f"the server aborted the request: {reason.get('message', reason)}"[:_SAID_CHARS])
        # An event repeats all tokens so far; with --incremental-streaming-output it carries only the new ones.
        ids, num_before = list(event["output_ids"]), len(self.output_ids)
        self.output_ids = ids if len(ids) == meta["completion_tokens"] else self.output_ids + ids
        num_new = len(self.output_ids) - num_before
        if num_new <= 0:
            return
        if num_before == 0:
            self.ttft_s = since_s
            self.itl_s = [0.0] * (num_new - 1)
        else:
            self.itl_s += [(since_s - self.e2e_s) / num_new] * num_new
        self.e2e_s = since_s
        self.prompt_tokens = meta["prompt_tokens"]
        self.cached = msgspec.convert(meta, PromptMeta).by_tier


async def stream_generate(
    session: aiohttp.ClientSession,
    url: str,
    input_ids: Sequence[int],
    max_new_tokens: int,
) -> StreamedAnswer:
    """Generate exactly ``max_new_tokens`` tokens, greedily.

    Raises StreamError, aiohttp.ClientError, and TimeoutError after the session's timeout.
    """
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    answer = StreamedAnswer()
    started_s = time.perf_counter()
    async with session.post(f"{url}/generate", json=body, read_bufsize=_LINE_BYTES) as response:
        if response.status != 200:
            said = (await response.text())[:_SAID_CHARS]
            raise StreamError(f"status {response.status}: {said}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                answer.add(json.loads(data), time.perf_counter() - started_s)
    if len(answer.output_ids) != max_new_tokens:
        raise StreamError(f"the stream ended after {len(answer.output_ids)} of {max_new_tokens} tokens")
    return answer


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
