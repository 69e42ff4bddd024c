"""Measures one server under load: cuts the prompts to its limits, warms it up, and sends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks.conversations import Conversation, Cut, Turn, make_conversations
from benchmarks.dataset import Dataset
from benchmarks.load import Arrivals, Load, LoadResult, Record, Transcript
from benchmarks.options import Options
from benchmarks.server_facts import ServerFacts
from benchmarks.stats import RunStats, Traffic, same_answers, summarise
from benchmarks.tokens import Tokens, load_tokens

_WARMUP_NEW_TOKENS = 4
_WARMUP_TIMEOUT_S = 600.0  # the first request may trigger compilation


class BenchmarkError(RuntimeError):
    """The run cannot continue."""


@dataclass(frozen=True)
class Run:
    """``fill`` describes how the store was filled before the run; None without storage.

    ``other_cores`` is how many cores other processes used on average during the run; None if not known.
    """

    name: str
    description: str
    result: LoadResult
    stats: RunStats
    traffic: Traffic
    same_answers: int
    other_cores: float | None = None
    fill: dict[str, Any] | None = None


@dataclass
class Workload:
    """The conversations. They are made once, for the first server, and sent to all servers."""

    options: Options
    dataset: Dataset
    transcript: Transcript = field(default_factory=Transcript)
    conversations: list[Conversation] = field(default_factory=list)
    tokens: Tokens | None = None
    max_input_tokens: int = 0
    server: ServerFacts | None = None

    def prepare(self, facts: ServerFacts) -> bool:
        """Make the conversations, if not done before. Return whether this call made them.

        Raises TokenizerError, and BenchmarkError if nothing fits.
        """
        if self.server is not None:
            return False
        options = self.options
        # One token less: SGLang requires prompt and answer together to be below its limit.
        room = facts.max_prompt_tokens - options.max_new_tokens - 1
        try:
            cut = Cut(
                options.num_conversations,
                options.turns,
                min(options.max_input_tokens, room),
                options.max_new_tokens,
            )
        except ValueError as e:
            raise BenchmarkError(str(e)) from e
        tokens = load_tokens(options.tokenizer or facts.tokenizer_path, self.dataset.sample())
        conversations = make_conversations(self.dataset, tokens, cut, dataset_answers=options.dataset_answers)
        if not conversations:
            raise BenchmarkError(f"{options.dataset} is too short for a conversation of {options.turns} turns")
        self.server, self.tokens, self.max_input_tokens = facts, tokens, cut.max_input_tokens
        self.conversations = conversations
        return True

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    def send(self, url: str, arrivals: Arrivals, title: str, before: Callable[[], None] = lambda: None) -> LoadResult:
        """Warm up the server, call ``before``, and send everything with a progress bar. Raises BenchmarkError."""
        self._warm_up(url)
        before()
        with tqdm(total=self.num_requests, desc=title, unit="request", dynamic_ncols=True) as bar:
            failures = 0

            def count(record: Record) -> None:
                nonlocal failures
                failures += record.error is not None
                bar.set_postfix(failures=failures, refresh=False)
                bar.update()

            load = Load(
                url,
                self.conversations,
                self.transcript,
                max_new_tokens=self.options.max_new_tokens,
                timeout_s=self.options.timeout_s,
                api_key=self.options.api_key,
                on_record=count,
            )
            return asyncio.run(load.run(arrivals))

    def _warm_up(self, url: str) -> None:
        """Send one prompt of full length twice. It is the same in all runs, so that it comes from storage if there is
        any, and warms up the code paths of the measured requests."""
        rng = random.Random("warm-up")
        vocabulary = sorted(
            {i for conversation in self.conversations for turn in conversation.turns for i in turn.user_ids}
        )
        prompt = Turn(tuple(rng.choices(vocabulary, k=self.max_input_tokens)))
        load = Load(
            url,
            [Conversation((prompt,))] * 2,
            Transcript(),
            max_new_tokens=min(_WARMUP_NEW_TOKENS, self.options.max_new_tokens),
            timeout_s=_WARMUP_TIMEOUT_S,
            api_key=self.options.api_key,
        )
        failed = [record.error for record in asyncio.run(load.run(Arrivals(concurrency=1))).records if record.error]
        if failed:
            raise BenchmarkError(f"the server failed the first request: {failed[0]}")


def make_run(
    name: str,
    description: str,
    result: LoadResult,
    traffic: Callable[[int], Traffic],
    first: LoadResult | None,
    *,
    other_cores: float | None = None,
    fill: dict[str, Any] | None = None,
) -> Run:
    """Make a run from its result. ``traffic`` returns the bytes read, given the tokens that came from storage."""
    stats = summarise(result)
    read = traffic(stats.cached_tokens.storage)
    return Run(name, description, result, stats, read, same_answers(result, first or result), other_cores, fill)
