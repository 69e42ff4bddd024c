"""Sends a streamed request to SGLang's ``/generate``, and measures it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_SAID_CHARS = 500


class StreamError(Exception):
    """The server refused or aborted a request. The message holds the server's answer."""


@dataclass
class CachedTokens:
    """The numbers of prompt tokens that were not computed, by the tier that they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass
class Answer:
    """``ttft_s`` is the time from sending to the first token. ``itl_s`` holds the gap before each later token; tokens
    that arrive together share the gap before them."""

    output_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per later token, or None if there is none."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None


class EventDecoder:
    """Decodes server-sent events without I/O: takes bytes, returns the ``data`` of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[str]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip().decode() for line in lines if line.startswith(b"data:")]


class AnswerBuilder:
    """Builds an answer from the stream's events."""

    def __init__(self, started_s: float) -> None:
        self.answer = Answer()
        self._started_s = started_s
        self._last_s = started_s

    def add(self, event: dict[str, Any], now_s: float) -> None:
        """Add an event. Raises StreamError if it says that the request failed."""
        if "error" in event:
            raise StreamError(f"the server answered: {json.dumps(event['error'])[:_SAID_CHARS]}")
        meta = event["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise StreamError(f"the server aborted the request: {reason.get('message', reason)}"[:_SAID_CHARS])
        answer = self.answer
        num_before = len(answer.output_ids)
        # `completion_tokens` counts all tokens so far. An event that repeats all of them has that many ids; with
        # --incremental-streaming-output an event carries only the new ones.
        ids = list(event["output_ids"])
        answer.output_ids = ids if len(ids) == meta["completion_tokens"] else answer.output_ids + ids
        num_new = len(answer.output_ids) - num_before
        if num_new <= 0:
            return
        if num_before == 0:
            answer.ttft_s = now_s - self._started_s
            # Tokens that arrive with the first one have no gap.
            answer.itl_s += [0.0] * (num_new - 1)
        else:
            answer.itl_s += [(now_s - self._last_s) / num_new] * num_new
        self._last_s = now_s
        answer.e2e_s = now_s - self._started_s
        answer.prompt_tokens = meta["prompt_tokens"]
        answer.cached = _cached_tokens(meta)


async def stream_generate(
    session: aiohttp.ClientSession, url: str, input_ids: Sequence[int], max_new_tokens: int, name: str | None = None
) -> Answer:
    """Generate exactly ``max_new_tokens`` tokens, greedily. ``name``, if given, becomes the server's request id.

    Raises StreamError, aiohttp.ClientError, and TimeoutError after the session's timeout.
    """
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    if name is not None:
        body["rid"] = name
    decoder = EventDecoder()
    builder = AnswerBuilder(time.perf_counter())
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            said = (await response.text())[:_SAID_CHARS]
            raise StreamError(f"status {response.status}: {said}")
        async for received in response.content.iter_any():
            now_s = time.perf_counter()
            for data in decoder.feed(received):
                if data == "[DONE]":
                    break
                builder.add(json.loads(data), now_s)
    if len(builder.answer.output_ids) != max_new_tokens:
        raise StreamError(f"the stream ended after {len(builder.answer.output_ids)} of {max_new_tokens} tokens")
    return builder.answer


def _cached_tokens(meta: dict[str, Any]) -> CachedTokens:
    details = meta.get("cached_tokens_details")
    if details is None:
        return CachedTokens(device=meta.get("cached_tokens", 0))
    return CachedTokens(*(details.get(tier, 0) for tier in ("device", "host", "storage")))
