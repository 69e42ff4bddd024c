"""Sends the same conversations to several servers, one after another."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.sharegpt.conversations import Conversation, load_encoder, make_conversations, read_dataset
from benchmarks.sharegpt.load import Load, Result, Transcript, poisson_starts_s
from harness.metrics import Traffic
from sgl_kvfetch.errors import ConfigError

_TIMEOUT_S = 30.0
_WARM_UP_NEW_TOKENS = 4
_WARM_UP_TIMEOUT_S = 600.0  # the first request may trigger compilation


@dataclass(frozen=True)
class Run:
    """``fill`` describes how the store was filled before the run; None without storage. ``other_cores``: how many cores
    other processes used on average."""

    name: str
    description: str
    result: Result
    traffic: Traffic
    other_cores: float
    fill: dict[str, Any] | None


@dataclass(frozen=True)
class ServerFacts:
    """``max_prompt_tokens`` reserves nothing for an answer."""

    version: str
    model_path: str
    tokenizer_path: str
    max_prompt_tokens: int
    pool_tokens: int
    page_size: int


def ask_facts(url: str) -> ServerFacts:
    """Return what SGLang says of itself."""
    model, info = (_get(url, path) for path in ("/model_info", "/server_info"))
    limits = (info.get(key) for key in ("context_length", "max_req_input_len", "max_total_num_tokens"))
    return ServerFacts(
        version=info["version"],
        model_path=model["model_path"],
        tokenizer_path=model["tokenizer_path"],
        max_prompt_tokens=min(limit for limit in limits if limit is not None),
        pool_tokens=info["max_total_num_tokens"],
        page_size=info["page_size"],
    )


def _get(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=_TIMEOUT_S) as response:
        found: dict[str, Any] = json.load(response)
    return found


class Workload:
    """The conversations. They are made once, cut to the limits of the first server, and sent to all servers."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        """``args``: the parsed command line. Raises ConfigError if the dataset cannot be read."""
        self.dataset = read_dataset(args.dataset)
        self.conversations: list[Conversation] = []
        self.server: ServerFacts | None = None
        self.token_ids = ""
        self.max_input_tokens = 0
        self._args, self._console = args, console
        self._transcript: Transcript = {}

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.conversations))

    def prepare(self, facts: ServerFacts) -> None:
        """Make the conversations, if not done before. Raises ConfigError if nothing fits."""
        if self.server is not None:
            return
        args = self._args
        # One token less: SGLang requires prompt and answer together to be below its limit.
        self.max_input_tokens = min(args.max_input_tokens, facts.max_prompt_tokens - args.max_new_tokens - 1)
        encode, self.token_ids = load_encoder(facts.tokenizer_path, self.dataset)
        self.conversations = make_conversations(
            self.dataset, encode, args.num_conversations, args.turns, self.max_input_tokens, args.max_new_tokens
        )
        self.server = facts
        self._console.print(
            f"{args.dataset} ({self.dataset.kind}): {len(self.conversations)} conversations, {self.num_requests} "
            f"requests, prompts of up to {self.max_input_tokens} tokens, answers of {args.max_new_tokens}"
        )
        self._console.print(f"token ids: {self.token_ids}")

    def send(self, url: str, title: str, *, fills: bool = False, before: Callable[[], None] = lambda: None) -> Result:
        """Warm up the server, call ``before``, and send everything with a progress bar. ``fills``: without pauses.

        Raises ConfigError if the server fails the warm-up.
        """
        args = self._args
        self._warm_up(url)
        before()
        with tqdm(total=self.num_requests, desc=title, unit="request", dynamic_ncols=True) as bar:
            load = Load(
                url,
                self.conversations,
                self._transcript,
                max_new_tokens=args.max_new_tokens,
                timeout_s=args.timeout,
                on_record=bar.update,
            )
            if fills or not args.request_rate:
                return asyncio.run(load.run(concurrency=args.concurrency))
            starts_s = poisson_starts_s(self.conversations, args.request_rate, args.seed)
            return asyncio.run(load.run(starts_s=starts_s))

    def _warm_up(self, url: str) -> None:
        """Send one prompt of full length twice. It is the same in all runs, so that it comes from storage if there is
        any, and warms up the code paths of the measured requests."""
        vocabulary = sorted({i for conversation in self.conversations for ids in conversation for i in ids})
        prompt = tuple(random.Random("warm-up").choices(vocabulary, k=self.max_input_tokens))
        load = Load(
            url,
            [(prompt,)] * 2,
            {},
            max_new_tokens=min(_WARM_UP_NEW_TOKENS, self._args.max_new_tokens),
            timeout_s=_WARM_UP_TIMEOUT_S,
        )
        for record in asyncio.run(load.run(concurrency=1)).records:
            if record.error:
                raise ConfigError(f"the server failed the first request: {record.error}")
