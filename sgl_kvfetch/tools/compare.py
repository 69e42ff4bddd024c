"""``kvfetch compare``: whether a running server answers from its caches as it does when it computes."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from aiohttp import ClientSession
from msgspec import Struct
from rich.table import Table

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.tools.bench_prompts import longest_prompt, make_groups, parse_lengths
from sgl_kvfetch.tools.prompts import FileOption
from sgl_kvfetch.tools.sglang_server import (
    flush_cache,
    generate,
    open_server,
    served_model,
    server_info,
    tokenise_on,
)
from sgl_kvfetch.tools.target import require_scheme
from sgl_kvfetch.tools.terminal import json_flag, make_progress, make_table, option, show

_ANSWER_TOKENS = 16
_WRITE_WAIT_S = 10.0  # for what is to be fetched, before caches are emptied
_TOP = 20  # logprobs of a token: as many as engines give without a flag
_LEAST = 1e-6  # probability; logprobs are rounded
_COMPUTED = "computed"

Found = Literal["sound", "differs", "nothing compared"]  # of prompts none of which came from a cache


class ComparedGroup(Struct, frozen=True):
    """The prompts of a group that came from the same place. ``source``: the tier that most cached tokens came from;
    ``computed`` if none was cached. Divergences are nats, means of all compared positions; ``repeated_kl`` is that of
    two computations."""

    name: str
    source: str
    num_prompts: int
    prompt_tokens: int  # median
    cached_tokens: int  # median
    num_positions: int
    kl: float
    longest_kl: float  # the largest mean of a prompt
    repeated_kl: float
    same_first_tokens: int  # prompts
    same_answers: int
    found: Found


class Comparison(Struct, frozen=True):
    server: str
    model: str
    most_kl: float
    skipped_prompts: int
    groups: list[ComparedGroup]

    @property
    def differs(self) -> bool:
        return any(group.found == "differs" for group in self.groups)

    @property
    def num_compared(self) -> int:
        """Prompts that came from a cache."""
        return sum(group.num_prompts for group in self.groups if group.found != "nothing compared")


def compare(
    server: Annotated[str, option("URL", "The server, with its caches as they are.", show_default=False)],
    file: FileOption = None,
    lengths: Annotated[str, option("TOKENS,...", "Without --file: lengths of prompts of our own.")] = "512,2048",
    prompts: Annotated[int, option("COUNT", "Prompts of each length, or at most of the file.", min=1)] = 10,
    most_kl: Annotated[
        float, option("NATS", "How much more answers from caches may diverge than two computed ones do.", min=0)
    ] = 0.03,
    flush: Annotated[
        bool,
        option(
            None,
            "Send each prompt before, and then empty the server's caches, also of its users' prompts: what is compared "
            "comes from the store.",
            "--flush",
        ),
    ] = False,
    as_json: Annotated[bool, json_flag(Comparison)] = False,
) -> None:
    """Ask a running server twice for the same answers, from its caches and recomputed, and compare the probabilities.

    Checksums cannot see that a cache is wrong: of another model, another adapter, shifted by a position, or coded too
    coarsely. So each prompt is sent as it is, and the server takes from its caches what it has. Then it is sent twice
    with a cache_salt that nobody used, and the server computes it. Answers are compared token by token, up to and with
    the first that differs: the Kullback-Leibler divergence of the next token, from computing to the cache. That of the
    two computations shows what is chance: sums in another order.

    Of each token, only the 20 likeliest are known, so divergences are lower bounds: what is left is taken as one token.
    A cache that is wrong is far beyond --most-kl, 0.03; the default target of `klt` is 0.001.

    It needs no plugin in the server: it compares SGLang's own host tier and storage backends, too. Each compared prompt
    is computed twice, and takes room in the caches. The exit code is 1 if answers from caches differ, or if nothing
    came from a cache.

    Examples:

        kvfetch compare --server http://127.0.0.1:30000 --file prompts.jsonl

        kvfetch compare --server http://127.0.0.1:30000 --lengths 1024,8192 --flush
    """
    server = require_scheme(server).rstrip("/")
    run = _Run(server, file, parse_lengths(lengths), prompts, most_kl, flush)
    result = asyncio.run(run.compare())
    show(result, as_json, _report(result))
    if result.differs or not result.num_compared:
        raise typer.Exit(1)


@dataclass(frozen=True)
class TopAnswer:
    """``tops``: for each token the logprobs of the likeliest, by token. ``cached``: the prompt's tokens that were not
    computed, by tier."""

    tokens: list[int]
    tops: list[dict[int, float]]
    cached: dict[str, int]

    @property
    def source(self) -> str:
        return max(self.cached, key=self.cached.__getitem__) if self.num_cached else _COMPUTED

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return a lower bound of the Kullback-Leibler divergence from ``p`` to ``q``, in nats. Both are the logprobs of
    some tokens, the likeliest.

    Tokens that both have count each; those that only ``p`` has count as one, and all others as one. Joining outcomes
    never adds divergence (Cover and Thomas, theorem 2.7.1). What ``q`` gives to those of ``p`` is not known, but each
    is at most as likely as the least likely that ``q`` has: of what is possible, the least divergence counts.
    """
    shared = p.keys() & q.keys()
    found = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
    rest_q = max(_LEAST, 1 - sum(math.exp(q[token]) for token in shared))
    alone_p = sum(math.exp(p[token]) for token in p.keys() - shared)
    others_p = max(0.0, 1 - sum(map(math.exp, p.values())))
    others_q = max(_LEAST, 1 - sum(map(math.exp, q.values())))
    alone_most = min(others_q, len(p.keys() - shared) * math.exp(min(q.values(), default=0.0)))
    alone_q = min(rest_q * alone_p / max(_LEAST, alone_p + others_p), alone_most)
    for own, other in ((alone_p, alone_q), (others_p, rest_q - alone_q)):
        if own > _LEAST:
            found += own * math.log(own / max(_LEAST, other))
    return max(0.0, found)


def compared(computed: TopAnswer, other: TopAnswer) -> list[float]:
    """Return the divergence at each position up to and with the first token that differs."""
    found = []
    for i, (token, p, q) in enumerate(zip(computed.tokens, computed.tops, other.tops, strict=False)):
        found.append(divergence(p, q))
        if other.tokens[i] != token:
            break
    return found


@dataclass(frozen=True)
class _Case:
    """The answers to one prompt."""

    prompt_tokens: int
    cached: TopAnswer
    computed: TopAnswer
    again: TopAnswer


@dataclass(frozen=True)
class _Run:
    server: str
    file: Path | None
    lengths: Sequence[int]
    sample: int
    most_kl: float
    flush: bool

    async def compare(self) -> Comparison:
        """Ask each prompt from the caches and computed, and compare the answers. Raises ConfigError."""
        async with open_server(self.server) as session:
            info = await server_info(session, self.server)
            longest, tokenise = longest_prompt(info, _ANSWER_TOKENS), partial(tokenise_on, session, self.server)
            groups, num_skipped = await make_groups(self.file, self.lengths, self.sample, longest, tokenise)
            prompts = [(group.name, prompt) for group in groups for prompt in group.prompts]
            if self.flush:
                for _, prompt in prompts:
                    await ask(session, self.server, prompt, None)
                await asyncio.sleep(_WRITE_WAIT_S)
                await flush_cache(session, self.server)
            cases: dict[tuple[str, str], list[_Case]] = {}
            with make_progress("compare") as progress:
                for name, prompt in progress.track(prompts):
                    case = await self._case(session, prompt)
                    cases.setdefault((name, case.cached.source), []).append(case)
        compared = [self._judged(*key, of_group) for key, of_group in cases.items()]
        return Comparison(self.server, served_model(info), self.most_kl, num_skipped, compared)

    async def _case(self, session: ClientSession, prompt: Sequence[int]) -> _Case:
        # From the caches first: what is computed goes into them, too, and could push out what is to be compared.
        cached = await ask(session, self.server, prompt, None)
        salts = (f"kvfetch-compare-{secrets.token_hex(8)}" for _ in range(2))
        computed, again = [await ask(session, self.server, prompt, salt) for salt in salts]
        if computed.num_cached or again.num_cached:
            raise ConfigError(
                f"--server {self.server} has {max(computed.num_cached, again.num_cached)} tokens cached for a "
                "cache_salt that nobody used: it knows none, so nothing can be compared with computing"
            )
        return _Case(len(prompt), cached, computed, again)

    def _judged(self, name: str, source: str, cases: Sequence[_Case]) -> ComparedGroup:
        """Return what the answers to a group's prompts show. ``source``: where their tokens came from."""
        of_cached = [compared(case.computed, case.cached) for case in cases]
        of_again = [compared(case.computed, case.again) for case in cases]
        kl = statistics.mean([each for positions in of_cached for each in positions])
        repeated_kl = statistics.mean([each for positions in of_again for each in positions])
        found: Found = "sound" if kl <= repeated_kl + self.most_kl else "differs"
        if source == _COMPUTED:
            found = "nothing compared"
        return ComparedGroup(
            name=name,
            source=source,
            num_prompts=len(cases),
            prompt_tokens=round(statistics.median(case.prompt_tokens for case in cases)),
            cached_tokens=round(statistics.median(case.cached.num_cached for case in cases)),
            num_positions=sum(map(len, of_cached)),
            kl=kl,
            longest_kl=max(map(statistics.mean, of_cached)),
            repeated_kl=repeated_kl,
            same_first_tokens=sum(case.computed.tokens[0] == case.cached.tokens[0] for case in cases),
            same_answers=sum(case.computed.tokens == case.cached.tokens for case in cases),
            found=found,
        )


async def ask(session: ClientSession, server: str, prompt: Sequence[int], cache_salt: str | None) -> TopAnswer:
    """Return the answer to a prompt, greedily. Raises StoreError."""
    options = {"return_logprob": True, "top_logprobs_num": _TOP}
    meta = await generate(session, server, prompt, _ANSWER_TOKENS, cache_salt, **options)
    tops = [{token: logprob for logprob, token, _ in top} for top in meta.output_top_logprobs]
    tokens = [token for _, token, _ in meta.output_token_logprobs]
    if not tokens or len(tokens) != len(tops):
        what = f"{len(tokens)} tokens, and the likeliest at {len(tops)} places"
        raise StoreError("protocol", f"{server}: the answer has {what}; expected {_ANSWER_TOKENS} of each")
    return TopAnswer(tokens, tops, meta.by_tier)


def _report(result: Comparison) -> Iterator[Table | str]:
    """Yield what a comparison found: a table, and what its figures mean."""
    columns = ("prompts", "tokens", "cached", "KL", "worst", "computed twice", "first token", "answer")
    table = make_table(("", "from", "found"), columns)
    table.title = f"Answers from caches compared with computed ones: {result.model}"
    for group in result.groups:
        table.add_row(
            group.name,
            group.source,
            group.found,
            f"{group.num_prompts:,}",
            f"{group.prompt_tokens:,}",
            f"{group.cached_tokens:,}",
            f"{group.kl:.2g}",
            f"{group.longest_kl:.2g}",
            f"{group.repeated_kl:.2g}",
            f"{group.same_first_tokens / group.num_prompts:.0%}",
            f"{group.same_answers / group.num_prompts:.0%}",
        )
    yield table
    yield "KL is a lower bound, in nats per token; the last columns are shares of prompts that got the same."
    if result.skipped_prompts:
        yield f"{result.skipped_prompts} prompts were left out: they are longer than the server takes"
    if not result.num_compared:
        yield (
            "nothing was compared, since nothing came from a cache: send prompts that the server has seen (--file), "
            "or --flush, which stores prompts first and empties the server's memory"
        )
    if result.differs:
        yield (
            f"answers from caches diverge by more than {result.most_kl:g} nats beyond chance: do not serve from them. "
            "kvfetch inspect shows which namespaces the store has, kvfetch clear deletes one"
        )
