"""Two real SGLang servers with two ranks each, one in each mode, on one store over TLS whose link fails in every way.

    python -m benchmarks.soak.engines --minutes 30 --json engines.json

Both servers write to the store and read from it, with audits of every hit. Prompts share beginnings, and SGLang's own
caches are emptied before each round of requests. Meanwhile the link is silent in the handshake, resets, hangs, cuts
answers, stalls in them, announces wrong lengths, answers with errors and garbage, and flips bits, one after the other,
with some seconds of peace between them; now and then a data plane is killed (SIGKILL). A part of the requests is
aborted, at any moment. The store has room for half of what is stored, so that it is written again and again.

It is a failure, and the exit code is 1, if

* an answer differs from that of a server without a store, in a token or in a log probability by more than 1e-4;
* a request fails, or takes longer than --longest;
* an audit finds that stored values are not those that the server computes;
* in the end, when the link is well, prompts are not stored and fetched, or `kvfetch verify` finds a fault;
* the memory of all processes together grows from the second quarter to the last one by more than --slack.

--seed fixes the prompts, and the order of prompts and faults. With --gpu-path, the server in device mode treats its
pools as those of a GPU: cells of `exact` stay coded until they are there, and Triton's interpreter restores them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import trustme
from rich.console import Console

from benchmarks.report import make_parser, output_file, settings, write_json
from harness.children import data_planes
from harness.engine import (
    Generation,
    ServerError,
    SGLangServer,
    device_args,
    hicache_args,
    servers_find_sglang_imported,
)
from harness.faults import Fault, FaultyProxy
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_llama
from harness.stand_in_gpu import RESTORED, on_the_gpu_path
from harness.store_process import StoreProcess

_BEGINNINGS, _ENDINGS = 6, 4  # of prompts
_BEGINNING_TOKENS, _ENDING_TOKENS = 384, 256
_ANSWER_TOKENS = 8
_REQUESTS = 3  # of a round, side by side
_PHASE_S = 4.0, 9.0  # how long a fault lasts, and how long the peace after it
_SET_S = 30.0
_SAMPLE_S = 5.0
_LATEST_ABORT_S = 3.0
_LAST_TRIES = 8
_CAPACITY_MIB = 12  # of the store; all prompts of all ranks take about twice as much
_RANKS = 2
_READY = "The server is fired up"  # in SGLang's log; a busy machine may make it call itself before it listens
_MIB = 1 << 20


def _is_data(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".kvd")


FAULTS: dict[str, Fault | None] = {
    "silent in the handshake": Fault("silent"),
    "resets": Fault("refuse"),
    "hangs": Fault("hang"),
    "hangs in a fetch": Fault("hang", only=_is_data),
    "cuts answers": Fault("close", after_bytes=1000, only=_is_data),
    "stalls in answers": Fault("stall", after_bytes=1000, only=_is_data),
    "is slow": Fault("slow", bytes_per_s=2e4, only=_is_data),
    "announces more": Fault("wrong_length", extra_bytes=9),
    "announces less": Fault("wrong_length", extra_bytes=-7),
    "answers 503": Fault("error", status=503),
    "answers garbage": Fault("garbage"),
    "flips a bit of data": Fault("flip", after_bytes=500, only=_is_data),
    "flips a bit of all answers": Fault("flip", after_bytes=60),
    "kills a data plane": None,
}


class EngineSoak:
    """The servers with their store, what disturbs them, and what was found."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._args = folder, args
        self._random = random.Random(args.seed)
        self._prompts = _make_prompts(args.seed)
        self._right: list[Generation] = []
        self._servers: dict[str, SGLangServer] = {}
        self.problems: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self.memory: list[tuple[float, float]] = []  # seconds, MiB

    async def run(self) -> dict[str, Any]:
        model = make_tiny_llama(self._folder / "model")
        with SGLangServer(model) as server:
            self._right = [self._ask(server, prompt) for prompt in self._prompts]
        tls, ca_file = _certificate(self._folder)
        with StoreProcess(self._folder / "store", extra_args=["--capacity", f"{_CAPACITY_MIB}MiB"]) as store:
            async with FaultyProxy("127.0.0.1", store.port, tls) as link:
                with self._running(model, link.url, ca_file):
                    await self._soak(link)
                    await self._end()
            if said := await asyncio.to_thread(_verify, store.url):
                self.problems[f"kvfetch verify: {said}"] += 1
        return self._results()

    @contextlib.contextmanager
    def _running(self, model: Path, url: str, ca_file: Path) -> Iterator[None]:
        config: dict[str, Any] = {
            "tls": {"ca_file": str(ca_file)},
            "audit_share": 1,
            "lookup_timeout_s": 2.0,
            "fetch_timeout_s": 5.0,
            "prefetch_threshold": 64,
        }
        with contextlib.ExitStack() as running:
            for mode, flags in (("host", hicache_args), ("device", device_args)):
                log = self._args.logs and self._args.logs / f"{mode}.log"
                env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_CACHE_HOME": str(self._folder / f"cache-{mode}")}
                if mode == "device" and self._args.gpu_path:
                    env |= on_the_gpu_path(self._folder / "gpu", restores=True)
                args = [*flags(url, **config), "--tp-size", str(_RANKS)]
                server = SGLangServer(model, extra_args=args, env=env, log_path=log)
                self._servers[mode] = running.enter_context(server)
            yield

    async def _soak(self, link: FaultyProxy) -> None:
        end_s = time.monotonic() + self._args.minutes * 60
        async with asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(self._disturb(link))
            sampling = tasks.create_task(self._sample())
            async with asyncio.TaskGroup() as asking:
                for mode in self._servers:
                    asking.create_task(self._ask_until(end_s, mode))
            disturbing.cancel()
            sampling.cancel()
        await link.set(None)

    async def _ask_until(self, end_s: float, mode: str) -> None:
        server, chance = self._servers[mode], random.Random(f"{self._args.seed} {mode}")
        while time.monotonic() < end_s:
            await asyncio.to_thread(server.flush)
            *chosen, aborted = chance.sample(range(len(self._prompts)), _REQUESTS + 1)
            aborting = self._abort(mode, aborted, chance.uniform(0.0, _LATEST_ABORT_S))
            await asyncio.gather(aborting, *(self._compare(mode, index) for index in chosen))

    async def _abort(self, mode: str, index: int, after_s: float) -> None:
        """Ask, and close the connection a moment later: SGLang then aborts the request."""
        body = json.dumps(
            {"input_ids": self._prompts[index], "stream": True, "sampling_params": {"max_new_tokens": 64}}
        )
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", self._servers[mode].port)
        writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        await asyncio.sleep(after_s)
        writer.close()
        self.requests[f"{mode}: aborted"] += 1

    async def _compare(self, mode: str, index: int) -> int:
        """Ask for an answer, and note how it is wrong. Return how many tokens came from the store."""
        began_s = time.monotonic()
        try:
            answer = await asyncio.to_thread(self._ask, self._servers[mode], self._prompts[index])
        except ServerError as e:
            self.problems[f"{mode}: {str(e)[-2000:]}"] += 1
            return 0
        took_s = time.monotonic() - began_s
        self.longest_s[mode] = max(took_s, self.longest_s.get(mode, 0.0))
        if took_s > self._args.longest:
            self.problems[f"{mode}: an answer took longer than {self._args.longest:g} s"] += 1
        right = self._right[index]
        far = max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True))
        if answer.output_ids != right.output_ids or far > 1e-4:
            self.problems[f"{mode}: an answer differs"] += 1
        stored = int(answer.cached_tokens_details.get("storage", 0))
        self.requests[f"{mode}: {'hits' if stored else 'computed'}"] += 1
        return stored

    @staticmethod
    def _ask(server: SGLangServer, prompt: list[int]) -> Generation:
        return server.generate(input_ids=prompt, max_new_tokens=_ANSWER_TOKENS, logprobs=True)

    async def _disturb(self, link: FaultyProxy) -> None:
        while True:
            for name in self._random.sample(list(FAULTS), len(FAULTS)):
                fault = FAULTS[name]
                if fault is None:
                    os.kill(self._random.choice(data_planes()), signal.SIGKILL)
                else:
                    async with asyncio.timeout(_SET_S):  # or the link would stay as it is, and nobody would know
                        await link.set(fault)
                self.faults[name] += 1
                await asyncio.sleep(self._random.uniform(*_PHASE_S))
                await link.set(None)
                await asyncio.sleep(self._random.uniform(*_PHASE_S))

    async def _sample(self) -> None:
        began_s = time.monotonic()
        while True:
            self.memory.append((time.monotonic() - began_s, await asyncio.to_thread(_memory_mib)))
            await asyncio.sleep(_SAMPLE_S)

    async def _end(self) -> None:
        """Prompts are stored and fetched again, once the pause after failed lookups is over."""
        for mode, server in self._servers.items():
            for _ in range(_LAST_TRIES):
                found = []
                for index in range(_BEGINNINGS):
                    await asyncio.to_thread(server.flush)
                    await self._compare(mode, index)
                    await asyncio.to_thread(wait_until_written, server, 0)
                    await asyncio.to_thread(server.flush)
                    found.append(await self._compare(mode, index) > 0)
                if all(found):
                    break
                await asyncio.sleep(_PHASE_S[1])
            else:
                self.problems[f"{mode}: {sum(found)} of {len(found)} prompts come from the store in the end"] += 1
            text, audits, log = server.metrics(), "sgl_kvfetch_audits_total", server.log().partition(_READY)[2]
            self.requests[f"{mode}: sound audits"] = round(read_metric(text, audits, result="sound"))
            if far := read_metric(text, audits, result="beyond"):
                self.problems[f"{mode}: audits that found other values"] += round(far)
            if mode == "device" and self._args.gpu_path and RESTORED not in log:
                self.problems[f"{mode}: no cell was restored by a kernel"] += 1
            if (begin := log.find("Traceback")) >= 0:
                self.problems[f"{mode}: tracebacks, such as {log[begin:][:4000]}"] += log.count("Traceback")

    def _results(self) -> dict[str, Any]:
        growth = None
        quarters = [[mib for at_s, mib in self.memory if at_s * 4 // max(self.memory[-1][0], 1) == q] for q in range(4)]
        if quarters[1] and quarters[3]:
            growth = statistics.median(quarters[3]) - statistics.median(quarters[1])
            if growth > self._args.slack:
                self.problems[f"memory grew by {growth:.0f} MiB"] += 1
        return {
            "requests": dict(self.requests),
            "faults": dict(self.faults),
            "longest_s": self.longest_s,
            "problems": dict(self.problems),
            "memory": self.memory,
            "growth_mib": growth,
        }


def _make_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(3, 2048) for _ in range(count)]

    beginnings = [tokens(_BEGINNING_TOKENS) for _ in range(_BEGINNINGS)]
    return [begin + tokens(_ENDING_TOKENS) for begin, _ in itertools.product(beginnings, range(_ENDINGS))]


def _certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return what a server of this machine needs for TLS, and the file of its CA."""
    authority, ca_file = trustme.CA(key_type=trustme.KeyType.ECDSA), folder / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA).configure_cert(tls)
    return tls, ca_file


def _verify(url: str) -> str | None:
    """Return what `kvfetch verify` found; None if all is well."""
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "verify", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr)[-1000:] if done.returncode else None


def _processes() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _memory_mib() -> float:
    """Return the memory of all processes, where each page that several share counts once."""
    total = 0
    for process in _processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / _MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if anything was wrong."""
    parser = make_parser("benchmarks.soak.engines", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--longest", type=float, default=60.0, metavar="S", help="a slower answer is a failure")
    parser.add_argument("--slack", type=int, default=300, metavar="MIB", help="by which memory may grow")
    parser.add_argument("--seed", type=int, default=0, help="see above")
    parser.add_argument("--gpu-path", action="store_true", help="see above")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to keep the servers' logs")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of `start_tls` at a server's end
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, servers_find_sglang_imported():
        results = asyncio.run(EngineSoak(Path(folder), args).run())
    for name in ("requests", "faults", "longest_s"):
        console.print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in results[name].items())}")
    growth = results["growth_mib"]
    console.print(
        f"memory: {results['memory'][-1][1]:.0f} MiB at the end, {growth or 0:+.0f} MiB since the 2nd quarter"
    )
    for problem, count in results["problems"].items():
        console.print(f"{count} x {problem}", style="red", markup=False, soft_wrap=True)
    if not results["problems"]:
        console.print("nothing was wrong")
    if args.json:
        write_json(args.json, settings(args) | results)
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
