"""``kvfetch bench``: time to first token on a running SGLang server, computed and fetched."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from aiohttp import ClientSession
from msgspec import Struct
from rich.table import Table

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.reasons import ADVICE
from sgl_kvfetch.tools.bench_prompts import Group, longest_prompt, make_groups, parse_lengths
from sgl_kvfetch.tools.prompts import FileOption
from sgl_kvfetch.tools.sglang_server import (
    flush_cache,
    generate,
    open_server,
    queued_text,
    served_model,
    server_info,
    server_samples,
    tokenise_on,
    total,
)
from sgl_kvfetch.tools.target import require_scheme
from sgl_kvfetch.tools.terminal import format_ratio, format_size, json_flag, make_progress, make_table, option, show
from sgl_kvfetch.tools.why import Asked, ask_status, different_fields, reason_of_difference, reason_of_request

if TYPE_CHECKING:
    from rich.progress import Progress

_LOOK_EVERY_S = 0.5
_WRITE_WAIT_S = 60.0  # until a store that takes nothing of what was computed is taken for one that never will
_ADVICE: dict[str, str] = {
    "in_memory": "the server had them in its memory: --reader must be another server",
    "unknown": "kvfetch why STORE --server URL --file FILE looks for the reason",
} | {str(reason): advice for reason, advice in ADVICE.items()}


class Measured(Struct, frozen=True):
    """Requests of a group in one pass. Tokens that were not computed, those of them that came from the store, and bytes
    that were read from it are means of a prompt. The bytes are None if some prompts of the group were not fetched."""

    p50_s: float
    all_s: list[float]
    cached_tokens: int
    stored_tokens: int
    wire_bytes: int | None


class GroupResult(Struct, frozen=True):
    """``fetched``: only prompts that got tokens from the store; None if none did. ``not_fetched``: the number of the
    other prompts by reason: a `Reason`, or a key of `_ADVICE`."""

    name: str
    num_prompts: int
    prompt_tokens: int  # median
    computed: Measured
    fetched: Measured | None
    not_fetched: dict[str, int]


class BenchResult(Struct, frozen=True):
    server: str
    reader: str
    model: str
    page_size: int
    skipped_prompts: int
    groups: list[GroupResult]


def bench(
    server: Annotated[str, option("URL", "An SGLang server that writes to the store.", show_default=False)],
    lengths: Annotated[str, option("TOKENS,...", "Without --file: lengths of prompts of our own.")] = "1024,4096",
    file: FileOption = None,
    prompts: Annotated[int, option("COUNT", "Prompts of each length, or at most of the file.", min=1)] = 10,
    flush: Annotated[
        bool,
        option(
            None, "Allow that the server's caches are emptied: its users' prompts leave its memory, too.", "--flush"
        ),
    ] = False,
    reader: Annotated[
        str | None, option("URL", "Another server of the same model and store: it fetches, and nothing is emptied.")
    ] = None,
    as_json: Annotated[bool, json_flag(BenchResult)] = False,
) -> None:
    """Measure the time to first token on a running server: of prompts that it prefills, and of the same ones fetched.

    Each prompt is sent with a cache_salt of its own, which nobody used before. So the server computes it, and writes it
    to the store. Then the caches in the server's memory are emptied, and each prompt is sent again, with the same salt.

    **In production, emptying the caches hurts**: the prompts of all users must be fetched or computed again. So the
    command asks for --flush. With --reader, it sends the prompts to a second server instead, which has never seen them,
    and empties nothing. Measure while nobody else sends requests: a busy server refuses to empty its caches.

    Without --file, prompts are cut from Python's language reference. The first prompt of each group is sent once more
    before the others, and not counted. The servers need --enable-metrics. If the server has a memory_cache, prompts
    come from there. What was written stays in the store until it is evicted. A server with an API key needs it as
    SGLANG_API_KEY in the environment; --flush needs the admin key, if there is one.

    The times of "fetched" are of prompts that came from the store. For the others, the command says why they did not.
    The exit code is 1 if nothing was fetched.

    Examples:

        kvfetch bench --server http://127.0.0.1:30000 --lengths 1024,8192 --flush

        kvfetch bench --server http://A:30000 --reader http://B:30000 --file prompts.jsonl
    """
    server = require_scheme(server).rstrip("/")
    reader = require_scheme(reader).rstrip("/") if reader is not None else server
    if reader == server and not flush:
        raise ConfigError(
            "to fetch what it has just computed, the server must forget it: --flush empties its caches, also of its "
            "other users' prompts; --reader URL measures on a second server instead, and empties nothing"
        )
    sizes = parse_lengths(lengths)
    result = asyncio.run(_bench(server, reader, sizes, file, prompts))
    show(result, as_json, _report(result))
    if not any(group.fetched for group in result.groups):
        raise typer.Exit(1)


async def _bench(server: str, reader: str, lengths: Sequence[int], file: Path | None, count: int) -> BenchResult:
    """Time prompts that the server computes, and the same ones fetched by ``reader``. Raises ConfigError."""
    async with open_server(server) as session:
        info = await server_info(session, server)
        if (size := (await server_info(session, reader))["page_size"]) != info["page_size"]:
            raise ConfigError(
                f"--server has pages of {info['page_size']} tokens, and --reader of {size}: it would find nothing"
            )
        _require_one_namespace(await ask_status(session, server), await ask_status(session, reader))
        tokenise = partial(tokenise_on, session, server)
        groups, num_skipped = await make_groups(file, lengths, count, longest_prompt(info, 1), tokenise)
        salt = f"kvfetch-bench-{secrets.token_hex(8)}"
        with make_progress("bench") as progress:
            task = progress.add_task("bench", total=2 * sum(len(group.prompts) + 1 for group in groups))
            run = _Run(session, salt, info["page_size"], progress, task)
            computed = [await run.send(server, group, waits=True) for group in groups]
            if reader == server:
                await flush_cache(session, server)
            again = [await run.send(reader, group) for group in groups]
        asked = await ask_status(session, reader)
    results = [_group_result(*each, asked) for each in zip(groups, computed, again, strict=True)]
    return BenchResult(server, reader, served_model(info), info["page_size"], num_skipped, results)


def _require_one_namespace(writing: Asked, reading: Asked) -> None:
    """Raise ConfigError if one server does not find what the other one stores."""
    if writing.status is None or reading.status is None:
        return
    different = different_fields(reading.status.namespace, writing.status.namespace)
    if different:
        what = ", ".join(f"{name} is {theirs!r} and {ours!r}" for name, (theirs, ours) in different.items())
        advice = ADVICE[reason_of_difference(different)]
        raise ConfigError(f"--reader would find nothing that --server stores: {what}; {advice}")


def _group_result(group: Group, computed: _Sent, again: _Sent, asked: Asked) -> GroupResult:
    """Compare both passes of a group."""
    fetched = [answer for answer in again.answers if answer.cached["storage"]]
    others = [answer for answer in again.answers if not answer.cached["storage"]]
    not_fetched = Counter(
        "in_memory" if any(each.cached.values()) else reason_of_request(asked, each.request_id, each.num_tokens)
        for each in others
    )
    return GroupResult(
        name=group.name,
        num_prompts=len(group.prompts),
        prompt_tokens=round(statistics.median(map(len, group.prompts))),
        computed=_measured(computed.answers, computed.read_bytes),
        # Reads of prompts that were not fetched in the end are in the sum of bytes, too.
        fetched=_measured(fetched, None if others else again.read_bytes) if fetched else None,
        not_fetched=dict(not_fetched),
    )


def _measured(answers: Sequence[_Answer], read_bytes: int | None) -> Measured:
    """``read_bytes``: all that were read for these answers."""
    times = [answer.ttft_s for answer in answers]
    return Measured(
        p50_s=statistics.median(times),
        all_s=times,
        cached_tokens=round(statistics.mean(sum(answer.cached.values()) for answer in answers)),
        stored_tokens=round(statistics.mean(answer.cached["storage"] for answer in answers)),
        wire_bytes=None if read_bytes is None else read_bytes // len(times),
    )


class _Run:
    """Sends groups of prompts. A prompt has one salt in all passes, and no other prompt has it."""

    def __init__(self, session: ClientSession, salt: str, page_size: int, progress: Progress, task: Any) -> None:
        self._session, self._salt, self._page_size = session, salt, page_size
        self._progress, self._task = progress, task

    async def send(self, server: str, group: Group, waits: bool = False) -> _Sent:
        """Send a group to a server. ``waits``: after each prompt until it is stored, which would take time from those
        that follow."""
        metrics = _Metrics(self._session, server)
        await self._ask(metrics, group.prompts[0], f"{group.name} first", waits)
        before = await metrics.read()
        answers = [
            await self._ask(metrics, prompt, f"{group.name} {number}", waits)
            for number, prompt in enumerate(group.prompts)
        ]
        after = await metrics.read()
        return _Sent(answers, after.read_bytes - before.read_bytes)

    async def _ask(self, metrics: _Metrics, prompt: Sequence[int], name: str, waits: bool) -> _Answer:
        """Have a prompt's first token generated: when the answer is there, so is the token."""
        before = await metrics.read()
        began_s = time.perf_counter()
        meta = await generate(self._session, metrics.server, prompt, 1, f"{self._salt} {name}")
        answer = _Answer(time.perf_counter() - began_s, meta.by_tier, meta.id, len(prompt))
        self._progress.advance(self._task)
        if waits:
            await metrics.wait_until_written(before, len(prompt) // self._page_size)
        return answer


class _Answer(NamedTuple):
    """``cached``: the prompt's tokens that were not computed, by tier."""

    ttft_s: float
    cached: dict[str, int]
    request_id: str
    num_tokens: int


class _Sent(NamedTuple):
    """``read_bytes``: what the server read meanwhile."""

    answers: list[_Answer]
    read_bytes: int


class _Sample(Struct, frozen=True):
    """Sums over all ranks of a server."""

    written_pages: int  # or dropped
    queued: str  # pages to be written, for people
    read_bytes: int


class _Metrics:
    def __init__(self, session: ClientSession, server: str) -> None:
        self.server = server
        self._session = session

    async def read(self) -> _Sample:
        """Raises ConfigError if the server has no metrics of ours."""
        samples = await server_samples(self._session, self.server)
        if not any(sample.name.startswith("sgl_kvfetch_") for sample in samples):
            raise ConfigError(f"{self.server} has no metrics of sgl_kvfetch: start it with --enable-metrics")
        return _Sample(
            round(total(samples, "sgl_kvfetch_written_pages_total")),
            queued_text(samples),
            round(total(samples, "sgl_kvfetch_wire_bytes_total", direction="read")),
        )

    async def wait_until_written(self, before: _Sample, num_pages: int) -> None:
        """Wait until that many pages have been written since ``before``, and nothing has changed for a moment: several
        ranks write what one request computed. Raises ConfigError if nothing changes for ``_WRITE_WAIT_S``."""
        last, until = before, asyncio.get_running_loop().time() + _WRITE_WAIT_S
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = await self.read()
            num_written = now.written_pages - before.written_pages
            if now == last and num_written >= num_pages and not now.queued:
                return
            if asyncio.get_running_loop().time() > until:
                wrote = f"{self.server} wrote {num_written} of {num_pages} pages, and no more for {_WRITE_WAIT_S:g} s"
                if now.queued:
                    raise ConfigError(f"{wrote}; {now.queued}: its log says why they are not stored")
                raise ConfigError(
                    f"{wrote}, and nothing waits in its write queue: a server writes with --hicache-write-policy "
                    "write_through and without the config key mode read_only"
                )
            if now != last:
                last, until = now, asyncio.get_running_loop().time() + _WRITE_WAIT_S


def _report(result: BenchResult) -> Iterator[Table | str]:
    """Yield what a benchmark found: a table, and what its figures mean."""
    columns = ("prompts", "tokens", "prefill, p50", "fetched, p50", "speedup")
    table = make_table(("",), (*columns, "cached tokens", "from the store", "bytes"))
    table.title = f"Time to first token in s: {result.model}"
    not_fetched = Counter[str]()
    for group in result.groups:
        computed, fetched = group.computed, group.fetched
        not_fetched.update(group.not_fetched)
        cells = [group.name, f"{group.num_prompts:,}", f"{group.prompt_tokens:,}", f"{computed.p50_s:.3g}"]
        if fetched is None:
            cells += ["-"] * 5
        else:
            cells += [f"{fetched.p50_s:.3g}", format_ratio(computed.p50_s / fetched.p50_s)]
            cells += [f"{fetched.cached_tokens:,}", f"{fetched.stored_tokens:,}"]
            cells += ["-" if fetched.wire_bytes is None else format_size(fetched.wire_bytes)]
        table.add_row(*cells)
    yield table
    yield "Tokens and bytes are means of a fetched prompt: from any cache, from the store, and on the network."
    if result.skipped_prompts:
        yield f"{result.skipped_prompts} prompts were left out: they are longer than the server takes"
    num_prompts = sum(group.num_prompts for group in result.groups)
    for reason, count in not_fetched.most_common():
        yield f"{count} of {num_prompts} prompts were not fetched: {reason}. What to do: {_ADVICE[reason]}"
