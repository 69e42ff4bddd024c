"""Measures how long users of multi-turn conversations wait: with no cache, SGLang's file backend, and kvfetch.

    python -m benchmarks.sharegpt --dataset FILE [-- SGLANG ARGS]

For each backend, a first SGLang serves all conversations and fills the store. When its writes have ended it is stopped,
and a fresh one, whose own caches are empty, serves the same conversations again: that is what is measured. `none` has
nothing to fill. Histories repeat the answers of the very first run, so that all runs send the same prompts, even if a
lossy cache changes answers. Each server is warmed up with a request that does not count.

`kvfetch bench` measures a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import aiohttp
import msgspec
from rich.console import Console
from xxhash import xxh3_64, xxh3_64_intdigest

from benchmarks.report import (
    distribution,
    make_parser,
    make_table,
    no_traceback,
    output_file,
    settings,
    whole_number,
    write_json,
)
from harness.engine import SGLangServer, hicache_args
from harness.metrics import Traffic, kvfetch_traffic, read_metric
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.tools.sglang_server import TIERS, PromptMeta

BACKENDS = ("none", "file", "kvfetch")
_TIMEOUT_S = 300.0
_QUIET_S = 2.0  # pages may wait in SGLang's host pool and queues, where no counter shows them
_SETTLE_S = 600.0
_LINE_BYTES = 1 << 20  # an event repeats all of its answer's tokens
_USER = ("human", "user", "system")

Conversation = list[list[int]]  # the user's ids, by turn
Transcript = dict[tuple[int, int], list[int]]  # answers in the histories, by conversation and turn


class _Message(msgspec.Struct, rename={"role": "from", "text": "value"}):
    role: Literal["human", "user", "gpt", "chatgpt", "assistant", "bing", "bard", "model", "system"]
    text: str


class _Dialogue(msgspec.Struct):
    conversations: list[_Message]


def read_dataset(path: Path) -> list[list[str]]:
    """Return the user's messages of each conversation in a ShareGPT file: a list as JSON, or lines (``.jsonl``). An
    answer to nothing counts for nothing: some conversations begin in the middle. Raises ConfigError."""
    try:
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            dialogues = msgspec.json.Decoder(_Dialogue).decode_lines(content)
        else:
            dialogues = msgspec.json.decode(content, type=list[_Dialogue])
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"dataset {path} cannot be read: {e}") from e
    found = []
    for dialogue in dialogues:
        said: list[str] = []
        is_answered = True
        for message in dialogue.conversations:
            if message.role not in _USER:
                is_answered = True
            elif is_answered:
                said.append(message.text)
                is_answered = False
            else:
                said[-1] += f"\n{message.text}"
        if said:
            found.append(said)
    if not found:
        raise ConfigError(f"dataset {path} has no user messages")
    return found


def make_conversations(args: argparse.Namespace, encode: Callable[[str], list[int]]) -> list[Conversation]:
    """Return conversations whose last prompts, which repeat all earlier turns with their answers, fit. Cut a first turn
    that is too long."""
    made = []
    for said in read_dataset(args.dataset)[: args.num_conversations]:
        turns = [encode(said[0])[: args.max_input_tokens]]
        used = len(turns[0])
        for text in said[1 : args.turns]:
            ids = encode(text)
            used += args.max_new_tokens + len(ids)
            if used > args.max_input_tokens:
                break
            turns.append(ids)
        made.append(turns)
    return made


@dataclass
class Answer:
    """``ttft_s``: from sending to the first token. ``cached``: the prompt's tokens that were not computed, by tier."""

    output_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


class _Failed(Exception):
    """The server refused or aborted a request. The message holds its answer."""


class Load:
    """Sends conversations to one server, each turn after the answer to the one before."""

    def __init__(self, url: str, args: argparse.Namespace, transcript: Transcript) -> None:
        self._url, self._args, self._transcript = url, args, transcript
        self.answers: dict[tuple[int, int], Answer] = {}
        self.errors: Counter[str] = Counter()
        self.prompts: dict[tuple[int, int], bytes] = {}

    async def run(self, conversations: Sequence[Conversation]) -> None:
        slots, timeout = asyncio.Semaphore(self._args.concurrency), aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            for number, conversation in enumerate(conversations):
                tasks.create_task(self._converse(session, slots, number, conversation))

    async def _converse(
        self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, number: int, conversation: Conversation
    ) -> None:
        """Send a conversation. A request that fails ends it."""
        history: list[int] = []
        async with slots:
            for turn, ids in enumerate(conversation):
                history += ids
                self.prompts[number, turn] = xxh3_64(repr(history).encode()).digest()
                try:
                    answer = await self._ask(session, history)
                except (TimeoutError, _Failed, aiohttp.ClientError) as e:
                    self.errors[str(e) or type(e).__name__] += len(conversation) - turn
                    return
                self.answers[number, turn] = answer
                history += self._transcript.setdefault((number, turn), answer.output_ids)

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int]) -> Answer:
        sampling = {"max_new_tokens": self._args.max_new_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        answer, began_s = Answer(), time.perf_counter()
        async with session.post(f"{self._url}/generate", json=body, read_bufsize=_LINE_BYTES) as response:
            if response.status != 200:
                raise _Failed(f"status {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event or (event["meta_info"].get("finish_reason") or {}).get("type") == "abort":
                    raise _Failed(f"the server answered: {data.decode()[:500]}")
                answer.e2e_s = time.perf_counter() - began_s
                answer.ttft_s = answer.ttft_s or answer.e2e_s
                answer.output_ids = event["output_ids"]
                answer.cached = msgspec.convert(event["meta_info"], PromptMeta).by_tier
        return answer


class Backend:
    """No storage."""

    flags: Sequence[str] = ()
    env: Mapping[str, str] = MappingProxyType({})
    fills = False

    def written(self, text: str) -> object:
        """Return what stays equal once all writes have ended, from a text of ``/metrics``."""
        return None

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        """Return the bytes read between two texts. ``storage_pages``: how many pages came from storage."""
        return Traffic(0, 0)


class FileStorage(Backend):
    """SGLang's own file backend: a file for each page and rank."""

    fills = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        flags = hicache_args("http://unused", host_pool_gb=1)
        ours = flags.index("--hicache-storage-backend")
        extra = "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 16})
        self.flags = [*flags[:ours], "--hicache-storage-backend", "file", *extra]
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}

    def written(self, text: str) -> object:
        return [path.stat().st_size for path in sorted(self._folder.glob("*.bin"))]

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        sizes = Counter[str]()
        for path in self._folder.glob("*.bin"):  # names begin with the page's hash
            sizes[path.name.partition("_")[0]] += path.stat().st_size
        num_bytes = storage_pages * (sizes.total() // max(1, len(sizes)))
        return Traffic(num_bytes, num_bytes)


class KVFetchStorage(Backend):
    fills = True

    def __init__(self, url: str, config: dict[str, Any]) -> None:
        self.flags = hicache_args(url, **({"host_pool_gb": 1} | config))

    def written(self, text: str) -> object:
        names = ("sgl_kvfetch_queued_bytes", "sgl_kvfetch_written_pages_total", "sglang:backuped_tokens_total")
        return [read_metric(text, name) for name in names]

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        return kvfetch_traffic(before, after)


@contextmanager
def opened(name: str, args: argparse.Namespace) -> Iterator[Backend]:
    """Yield a backend with an empty storage."""
    with TemporaryDirectory(prefix="kvfetch-bench-", ignore_cleanup_errors=True) as folder:
        if name == "none":
            yield Backend()
        elif name == "file":
            yield FileStorage(Path(folder))
        else:
            with StoreProcess(folder) as store:
                yield KVFetchStorage(store.url, args.kvfetch)


def wait_until_settled(backend: Backend, server: SGLangServer) -> None:
    seen, changed_s = object(), time.monotonic()

    def is_settled() -> bool:
        nonlocal seen, changed_s
        if (now := backend.written(server.metrics())) != seen:
            seen, changed_s = now, time.monotonic()
        return time.monotonic() - changed_s >= _QUIET_S

    wait_until(is_settled, timeout_s=_SETTLE_S, poll_s=0.25)


def run(
    name: str, model: Path, conversations: Sequence[Conversation], transcript: Transcript, args: argparse.Namespace
) -> tuple[dict[str, Any], Load]:
    """Return the figures of a backend, and what it was asked."""
    with opened(name, args) as backend:
        flags = [*backend.flags, *args.sglang_args]
        for is_measured in (False, True) if backend.fills else (True,):
            with SGLangServer(model, extra_args=flags, env=backend.env, request_timeout_s=_TIMEOUT_S) as server:
                asyncio.run(Load(server.url, args, {}).run([[list(range(3, 3 + args.max_input_tokens))]]))
                before, load, began_s = server.metrics(), Load(server.url, args, transcript), time.perf_counter()
                asyncio.run(load.run(conversations))
                duration_s = time.perf_counter() - began_s
                if not is_measured:
                    wait_until_settled(backend, server)
                after, page_size = server.metrics(), json.loads(server.request("GET", "/server_info"))["page_size"]
        cached = {tier: sum(answer.cached[tier] for answer in load.answers.values()) for tier in TIERS}
        traffic = backend.read(before, after, cached["storage"] // page_size)
    answers = list(load.answers.values())
    later = args.max_new_tokens - 1
    times = {
        "ttft_s": [answer.ttft_s for answer in answers],
        "tpot_s": [(answer.e2e_s - answer.ttft_s) / later for answer in answers if later],
        "e2e_s": [answer.e2e_s for answer in answers],
    }
    found = {
        "name": name,
        "requests": sum(map(len, conversations)),
        "failures": load.errors.total(),
        "errors": load.errors,
        "cached_tokens": cached,
        **{key: distribution(values) for key, values in times.items()},
        "requests_per_s": len(answers) / duration_s,
        "wire_bytes": traffic.wire_bytes,
        "raw_bytes": traffic.raw_bytes,
        "prompts_digest": xxh3_64(b"".join(load.prompts[key] for key in sorted(load.prompts))).hexdigest(),
    }
    return found, load


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if requests failed."""
    args, console = _parse(sys.argv[1:] if argv is None else argv), Console(soft_wrap=True, highlight=False)
    found: list[dict[str, Any]] = []
    loads: list[Load] = []
    with no_traceback(), TemporaryDirectory(prefix="kvfetch-bench-") as folder:
        model = args.model or make_tiny_llama(Path(folder, "model"))
        conversations = make_conversations(args, _encoder(model) if args.model else _hashed)
        transcript: Transcript = {}
        for name in args.backends:
            console.print(f"{name}: {sum(map(len, conversations))} requests")
            row, load = run(name, model, conversations, transcript, args)
            loads.append(load)
            right = [load.answers[key].output_ids == a.output_ids for key, a in loads[0].answers.items()
                     if key in load.answers]  # fmt: skip
            found.append(row | {"same_answers_as_first_run": sum(right)})
    console.print(make_table("Measured", ("", *(row["name"] for row in found)), _rows(found)))
    for row in found:
        for error, count in row["errors"].items():
            console.print(f"{row['name']}: {count} x {error}", style="red", markup=False)
    if args.json:
        write_json(args.json, {**settings(args), "runs": found})
        console.print(f"wrote {args.json}")
    return 1 if any(row["failures"] for row in found) else 0


def _encoder(model: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _hashed(text: str) -> list[int]:
    """Return an id for each word, for a random model, whose tokenizer knows none. What repeats in the text does so in
    the prompt."""
    return [3 + xxh3_64_intdigest(word.encode()) % 2000 for word in text.split()]


def _rows(found: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for key in ("requests", "failures", "same_answers_as_first_run"):
        yield [key.replace("_", " "), *(str(row[key]) for row in found)]
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        for which in ("p50", "p95"):
            times = (row[key][which] for row in found)
            yield [f"{key[:-2].upper()} (ms), {which}", *("" if x is None else f"{1e3 * x:.1f}" for x in times)]
    yield ["requests/s", *(f"{row['requests_per_s']:.2f}" for row in found)]
    for tier in TIERS:
        yield [f"cached, from {tier}", *(str(row["cached_tokens"][tier]) for row in found)]
    for key in ("wire_bytes", "raw_bytes"):
        yield [f"read, {key.removesuffix('_bytes')} (MB)", *(f"{row[key] / 1e6:.2f}" for row in found)]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    own, sglang_args = list(argv), []
    if "--" in own:
        own, sglang_args = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = make_parser("benchmarks.sharegpt", __doc__)
    parser.add_argument("--dataset", type=Path, required=True, help="ShareGPT's JSON, or lines of it (.jsonl)")
    parser.add_argument("--num-conversations", type=whole_number, default=8, help="at most")
    parser.add_argument("--turns", type=whole_number, default=3, help="at most, for each")
    parser.add_argument("--max-input-tokens", type=whole_number, default=1500, help="of a prompt")
    parser.add_argument("--max-new-tokens", type=whole_number, default=16, help="of every answer")
    parser.add_argument("--concurrency", type=whole_number, default=2, help="conversations at a time")
    parser.add_argument("--model", type=Path, help="a model's directory; else a small random Llama")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="separated by commas")
    parser.add_argument("--kvfetch", type=json.loads, default={}, metavar="JSON", help="more keys of kvfetch's config")
    parser.add_argument("--json", type=output_file, help="where to write all figures")
    args = parser.parse_args(own)
    args.sglang_args, args.backends = sglang_args, args.backends.split(",")
    if unknown := {*args.backends} - {*BACKENDS}:
        parser.error(f"--backends: {', '.join(sorted(unknown))} is unknown; known are {', '.join(BACKENDS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
