"""Plans the requests of a run, sends them, and records the answers."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.interference.spans import Request
from sgl_kvfetch.timeline import Span
from sgl_kvfetch.tools.sglang_server import stream_generate

LONG_TIMEOUT_S = 120.0
_VOCABULARY = range(3, 1000)


@dataclass(frozen=True)
class Prompt:
    name: str  # SGLang's request id
    start_s: float
    tokens: list[int]


@dataclass(frozen=True)
class Plan:
    short: list[Prompt]
    long: list[Prompt]


@dataclass(frozen=True)
class Run:
    """One run of one mode. ``spans``: those that the server recorded. ``other_cores``: how many cores other processes
    used on average."""

    short: list[Request]
    long: list[Request]
    spans: list[Span]
    other_cores: float = 0.0

    @property
    def share_during_fetch(self) -> float:
        """Return the share of short requests that were sent during a fetch."""
        return sum(self.is_during_fetch) / len(self.is_during_fetch)

    @property
    def is_during_fetch(self) -> list[bool]:
        """Return for each short request whether it was sent while a long one waited for its first token."""
        return [any(long.sent_s <= r.sent_s < long.first_s for long in self.long) for r in self.short]


def make_plan(options: argparse.Namespace) -> Plan:
    """Plan a run: short prompts arrive as a Poisson process, long ones at equal intervals."""
    rng = random.Random(options.seed)

    def prompt(kind: str, index: int, start_s: float, num_tokens: int) -> Prompt:
        return Prompt(f"{kind}-{index}", start_s, rng.choices(_VOCABULARY, k=num_tokens))

    short: list[Prompt] = []
    now_s = 0.0
    while (now_s := now_s + rng.expovariate(options.short_rate)) < options.duration_s:
        short.append(prompt("short", len(short), now_s, options.short_tokens))
    gap_s = options.duration_s / options.long_prompts
    return Plan(short, [prompt("long", i, i * gap_s, options.long_tokens) for i in range(options.long_prompts)])


async def send(
    url: str, short: Sequence[Prompt], long: Sequence[Prompt], new_tokens: int
) -> tuple[list[Request], list[Request]]:
    """Send every prompt at its time. Long ones generate one token. Raises what ``stream_generate`` raises."""
    timeout = aiohttp.ClientTimeout(total=LONG_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    started_s = time.monotonic()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: Prompt, num_new: int) -> Request:
            await asyncio.sleep(max(0.0, started_s + prompt.start_s - time.monotonic()))
            sent_s = time.monotonic()
            answer = await stream_generate(session, url, prompt.tokens, num_new, prompt.name)
            return Request(
                prompt.name,
                sent_s,
                sent_s + answer.ttft_s,
                sent_s + answer.e2e_s,
                answer.tpot_s or 0.0,
                answer.cached["storage"],
            )

        return await asyncio.gather(
            asyncio.gather(*(one(prompt, new_tokens) for prompt in short)),
            asyncio.gather(*(one(prompt, 1) for prompt in long)),
        )
