"""Measures an agent's session: turns that come one after another on one server, or on two in turns, and what they cost
the store.

    python -m benchmarks.sessions [--turns N] [--tokens N] [--pause S] [--mode host,device] [--replicas 1,2]
                                  [--store http,s3] [--kill] [--json FILE]

Each turn's prompt is that of the turn before with its answer, and some tokens more. Then the session is compacted: one
prompt asks for a summary behind all turns, the next one goes on with the first turn and the summary. In the end, the
servers forget what they have, and one asks for the prompt of the last turn several times, which then comes from the
store. Bytes are counted at the store, and divided by those that the same prompts take when they are written at once.
``disk`` is the most that the store held at any second. ``hits`` is the share of whole pages that only another replica
had computed before, and that were not computed again.

With ``--kill``, the store is killed (SIGKILL) in the middle of the session, while it is written to, and started again
two turns later; and later on a data plane of each server. Bytes are not counted then.

Each answer is compared with that of a server without a store: its tokens, and their log probabilities within 1e-4. The
exit code is 1 if one differs; if what was stored of the session before the store was killed is not found afterwards; or
if `kvfetch verify` finds a fault in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import and_, eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.machine import machine, versions
from benchmarks.report import (
    make_parser,
    make_table,
    output_file,
    settings,
    whole_number,
    whole_numbers,
    write_json,
)
from harness.children import data_planes
from harness.engine import Generation, SGLangServer, device_args, hicache_args, servers_find_sglang_imported
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.s3_server import BUCKET, open_bucket, running_s3_server
from harness.store_process import StoreProcess
from harness.waiting import wait_until

_MODES: dict[str, Callable[..., list[str]]] = {"host": hicache_args, "device": device_args}
_PAGE_SIZE = 64
_ANSWER_TOKENS = 4
_LAST = 4  # times that the whole prompt is fetched, of which the first does not count
_LOOK_EVERY_S = 0.2
_DOWN_TURNS = 2  # that come while the store is down


@dataclass
class _Store:
    """A store, its counters, and how it is killed. ``held``: returns the bytes of its objects."""

    url: str
    traffic: Callable[[], tuple[int, int]]  # received and sent
    held: Callable[[], int]
    process: StoreProcess | None = None


@dataclass
class _Session:
    """One way to run the session, and what was found."""

    store: _Store
    servers: Sequence[SGLangServer]
    prompts: Sequence[Sequence[int]]
    last: int  # turn; the prompts behind it compact the session
    right: Sequence[Generation]
    pause_s: float
    problems: list[str] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def ask(self, turn: int, **options: Any) -> Generation:
        """Ask the next server for a turn's answer, and compare it."""
        answer = _ask(self.servers[turn % len(self.servers)], self.prompts[turn], **options)
        far = max(abs(a - b) for a, b in zip(answer.logprobs, self.right[turn].logprobs, strict=True))
        if answer.output_ids != self.right[turn].output_ids or far > 1e-4:
            self.problems.append(f"the answer of turn {turn + 1} differs, by {far:.2g}")
        return answer

    def turn(self, turn: int) -> None:
        answer = self.ask(turn)
        self.ttft_s.append(answer.ttft_s)
        own, any_server = self._shared(turn, len(self.servers)), self._shared(turn, 1)
        if any_server > own:
            self.found.append(max(0, answer.cached_tokens - own) / (any_server - own))
        time.sleep(self.pause_s)

    def _shared(self, turn: int, step: int) -> int:
        """Return how many tokens, in whole pages, a prompt shares with one of every ``step``th turn before it, and its
        answer. The answer's last token has no KV."""
        prompt, turns = self.prompts[turn], range(turn - step, -1, -step)
        earlier = ([*self.prompts[each], *self.right[each].output_ids[:-1]] for each in turns)
        shared = (sum(accumulate(map(eq, prompt, each), and_)) for each in earlier)
        return max(shared, default=0) // _PAGE_SIZE * _PAGE_SIZE

    def settle(self) -> None:
        """Wait until nothing is queued, and the store's counters stand still."""
        for server in self.servers:
            wait_until_written(server, 0)
        last = None
        while (now := self.store.traffic()) != last:
            last = now
            time.sleep(1.5)

    def fetched(self, turn: int) -> Generation:
        """Fetch a turn's prompt from the store, by the server that asks for this turn."""
        self.settle()
        self.servers[turn % len(self.servers)].flush()
        return self.ask(turn)

    def run(self) -> None:
        for turn in range(len(self.prompts)):
            self.turn(turn)

    def run_and_kill(self) -> None:
        """Kill the store in the middle, while the last turn is being written, and data planes later on."""
        store, turns = self.store.process, self.last + 1
        killed, restarted = turns // 2, min(turns // 2 + _DOWN_TURNS, turns - 1)
        stored = 0
        for turn in range(turns):
            if turn == killed:
                stored = int(self.fetched(turn - 1).cached_tokens_details.get("storage", 0))
            self.turn(turn) if turn != killed else self.ask(turn)
            if turn == killed and store is not None:
                store.kill()
            if turn == restarted and store is not None:
                store.start()
                self._expect(killed - 1, stored)
            if turn == 3 * turns // 4:
                for process_id in data_planes():
                    os.kill(process_id, signal.SIGKILL)

    def _expect(self, turn: int, stored: int) -> None:
        """Note a problem unless a turn's prompt is found as far as it was stored, once lookups go on."""
        found = 0

        def is_found() -> bool:
            nonlocal found
            found = int(self.fetched(turn).cached_tokens_details.get("storage", 0))
            return found >= stored

        try:
            wait_until(is_found, timeout_s=60)
        except TimeoutError:
            self.problems.append(f"{found} of {stored} tokens that were stored are found after the store was killed")


def _ask(server: SGLangServer, prompt: Sequence[int], **options: Any) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=_ANSWER_TOKENS, logprobs=True, **options)


class _Peak:
    """Notes the most bytes that a store holds, on a thread."""

    def __init__(self, held: Callable[[], int]) -> None:
        self.num_bytes = 0
        self._held, self._ends = held, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(_LOOK_EVERY_S):
            self.num_bytes = max(self.num_bytes, self._held())


@contextmanager
def _http(folder: Path) -> Iterator[_Store]:
    with StoreProcess(folder / "store") as store:

        def traffic() -> tuple[int, int]:
            said = urllib.request.urlopen(f"{store.url}/metrics").read().decode()
            counts = dict(re.findall(r"(?m)^kvfetch_server_(received|sent)_bytes_total ([\d.e+]+)$", said))
            return round(float(counts["received"])), round(float(counts["sent"]))

        def held() -> int:
            total = 0
            for path in store.directory.rglob("*.kv[dm]"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue  # it was deleted meanwhile
            return total

        yield _Store(store.url, traffic, held, store)


@contextmanager
def _s3(folder: Path) -> Iterator[_Store]:
    with running_s3_server() as s3:
        bucket = open_bucket(s3.config)

        def held() -> int:
            return sum(each["size"] for some in bucket.list() for each in some)

        keys = {f"AWS_{key.upper()}": value for key, value in s3.config.items()}
        before = {key: os.environ.get(key) for key in keys}
        os.environ.update(keys)
        try:
            yield _Store(f"s3://{BUCKET}", lambda: (s3.received_bytes, s3.sent_bytes), held)
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


_STORES = {"http": _http, "s3": _s3}


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    num_tokens = (args.turns + 1) * (args.tokens + _ANSWER_TOKENS)
    room = ["--page-size", str(_PAGE_SIZE), "--context-length", str(num_tokens + 64)]
    room += ["--max-total-tokens", str(2 * num_tokens + 1024)]
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="kvfetch-sessions-") as name, servers_find_sglang_imported():
        model = make_tiny_llama(Path(name, "model"), max_position_embeddings=32768, num_layers=2)
        with SGLangServer(model, extra_args=room) as server:
            prompts, right = _computed(server, args)
        ways = [(mode, replicas, store) for mode in args.mode for replicas in args.replicas for store in args.store]
        for number, (mode, replicas, kind) in enumerate(ways):
            with ExitStack() as running:
                store = running.enter_context(_STORES[kind](Path(name, str(number))))
                flags = [*_MODES[mode](store.url), *room]
                servers = [running.enter_context(SGLangServer(model, extra_args=flags)) for _ in range(replicas)]
                session = _Session(store, servers, prompts, args.turns - 1, right, args.pause)
                row = _killed(session) if args.kill else _measured(session)
            rows.append({"mode": mode, "replicas": replicas, "store": kind, **row, "problems": session.problems})
            for problem in session.problems:
                console.print(f"{mode} {replicas} {kind}: {problem}")
    if rows and not args.kill:
        console.print(make_table("A session", *_cells(rows)))
    console.print(f"{sum(row['answers'] for row in rows)} answers were compared")
    return {
        "benchmark": "sessions",
        "settings": settings(args),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _computed(server: SGLangServer, args: argparse.Namespace) -> tuple[list[list[int]], list[Generation]]:
    """Return the prompts and their answers, each computed anew."""
    rng = random.Random(77)
    turns = [[rng.randrange(3, 2048) for _ in range(args.tokens)] for _ in range(args.turns + 2)]
    _ask(server, [token for turn in turns[:-1] for token in turn])  # the first one of such a length takes longer
    prompts: list[list[int]] = []
    right: list[Generation] = []
    prompt: list[int] = []
    for number, turn in enumerate(turns):
        prompt = (prompts[0] if number > args.turns else prompt) + turn
        server.flush()
        prompts.append(prompt)
        right.append(answer := _ask(server, prompt))
        prompt = prompt + answer.output_ids
    return prompts, right


def _measured(session: _Session) -> dict[str, Any]:
    store, last = session.store, session.last
    session.settle()
    before = store.traffic()
    with _Peak(store.held) as peak:
        session.run()
        session.settle()
    after = store.traffic()
    fetched = [session.fetched(last) for _ in range(_LAST)]
    session.settle()
    began = store.traffic()
    for prompt in session.prompts[last + 1 :]:
        _ask(session.servers[0], prompt, cache_salt="at once")
        session.settle()
    unique = store.traffic()[0] - began[0]
    return {
        "answers": len(session.prompts) + _LAST,
        "unique_bytes": unique,
        "sent": (after[0] - before[0]) / unique,
        "received": (after[1] - before[1]) / unique,
        "disk": peak.num_bytes / unique,
        "hits": statistics.mean(session.found) if session.found else None,
        "turn_s": statistics.median(session.ttft_s),
        "computed_s": session.right[last].ttft_s,
        "fetched_s": statistics.median(answer.ttft_s for answer in fetched[1:]),
        "fetched_tokens": int(fetched[-1].cached_tokens_details.get("storage", 0)),
    }


def _killed(session: _Session) -> dict[str, Any]:
    session.run_and_kill()
    last = session.last
    session.fetched(last)  # what was not stored is stored now
    tokens = int(session.fetched(last).cached_tokens_details.get("storage", 0))
    if tokens < (len(session.prompts[last]) - 1) // _PAGE_SIZE * _PAGE_SIZE:
        session.problems.append(f"{tokens} tokens come from the store in the end")
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "verify", session.store.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        session.problems.append((done.stdout + done.stderr)[-1000:])
    return {"answers": last + 1 + 4, "fetched_tokens": tokens}


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    cells = [
        [
            f"{row['mode']}, {row['replicas']} on {row['store']}",
            *(f"{row[key]:.2f}" for key in ("sent", "received", "disk")),
            "-" if row["hits"] is None else f"{row['hits']:.0%}",
            *(f"{row[key]:.3f}" for key in ("turn_s", "fetched_s", "computed_s")),
        ]
        for row in rows
    ]
    columns = "sent a byte", "received a byte", "disk", "hits", "turn, p50 s", "whole prompt, fetched", "computed"
    return ("", *columns), cells


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if anything was wrong."""
    parser = make_parser("benchmarks.sessions", __doc__)
    parser.add_argument("--turns", type=whole_number, default=30)
    parser.add_argument("--tokens", type=whole_number, default=330, help="of each turn")
    parser.add_argument("--pause", type=float, default=0.5, metavar="S", help="between turns")
    parser.add_argument("--mode", type=lambda text: _names(text, list(_MODES)), default="host,device")
    parser.add_argument("--replicas", type=whole_numbers, default="1,2", help="servers that take turns")
    parser.add_argument("--store", type=lambda text: _names(text, list(_STORES)), default="http,s3")
    parser.add_argument("--kill", action="store_true", help="see above")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    found = run(args, console)
    if args.json:
        write_json(args.json, found)
    return int(any(row["problems"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
