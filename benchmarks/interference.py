"""What fetching does to the requests that need no fetch.

    python -m benchmarks.interference --launch --json out.json

A stream of short prompts that nobody has seen, while long prompts, stored before, are fetched over a slow link. Four
modes in turn, repeated: `none` (the short prompts alone), `device` (device mode), `host` (HiCache's host tier and
SGLang's own prefetch) and `blocking` (device mode, its scheduler made to wait for each fetch, as the paper's baseline
does). Every mode sees the same prompts at the same times, and starts with empty caches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.client import Answer, stream_generate
from benchmarks.machine import machine, versions
from benchmarks.report import write_json
from sgl_kvfetch.testing.engine import SGLangServer, device_args, hicache_args
from sgl_kvfetch.testing.metrics import wait_until_written
from sgl_kvfetch.testing.models import make_tiny_llama
from sgl_kvfetch.testing.store_process import StoreProcess

PAGE_SIZE = 16
MODES = ("none", "device", "host", "blocking")
_BLOCKING = Path(__file__).parent / "blocking"
_LONG_TIMEOUT_S = 120.0
_VOCABULARY = range(3, 1000)


@dataclass(frozen=True)
class Plan:
    """What is sent, and when: ``(start_s, prompt)`` each."""

    short: list[tuple[float, list[int]]]
    long: list[tuple[float, list[int]]]


@dataclass(frozen=True)
class Sample:
    """One run of one mode. ``long_storage_tokens``: of each long prompt, how many came from the store."""

    ttft_s: list[float]
    tpot_s: list[float]
    long_ttft_s: list[float]
    long_storage_tokens: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="kvfetch-interference-", ignore_cleanup_errors=True) as folder:
        model = args.model or str(make_tiny_llama(Path(folder, "model")))
        plan = _plan(args)
        store = Path(folder, "store")
        _fill(model, store, plan, args, console)
        samples: dict[str, list[Sample]] = {mode: [] for mode in args.modes}
        for round_idx in range(args.rounds):
            # Each round in another order, so that no mode is always the first on a machine that changes.
            order = args.modes[round_idx % len(args.modes) :] + args.modes[: round_idx % len(args.modes)]
            for mode in order:
                with console.status(f"round {round_idx + 1} of {args.rounds}: {mode}"):
                    samples[mode].append(_measure(mode, model, store, plan, args))
    rows = _rows(samples)
    console.print(_table(rows))
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        write_json(args.json, {**settings, "modes": rows, "machine": machine(), "versions": versions()})
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", required=True, help="start SGLang and store, once a run")
    parser.add_argument("--model", help="a model's directory; a small random Llama if not given")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of a run (default: %(default)s)")
    parser.add_argument("--short-rate", type=float, default=2.0, help="short prompts a second (default: %(default)s)")
    parser.add_argument("--short-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of a short prompt (default: %(default)s)")
    parser.add_argument("--long-prompts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--long-tokens", type=int, default=1536, help="(default: %(default)s)")
    parser.add_argument(
        "--link-gbps", type=float, default=0.02, help="the store's link; a fetch should take seconds (default: 0.02)"
    )
    parser.add_argument(
        "--codec", default="zstd", help="of what is stored; zstd decodes fastest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    args.modes = args.modes.split(",")
    if unknown := set(args.modes) - set(MODES):
        parser.error(f"--modes: unknown are {', '.join(sorted(unknown))}; known are {', '.join(MODES)}")
    if "none" not in args.modes:
        parser.error("--modes: 'none' is what the others are compared with")
    return args


def _plan(args: argparse.Namespace) -> Plan:
    rng = random.Random(args.seed)

    def prompt(num_tokens: int) -> list[int]:
        return rng.choices(_VOCABULARY, k=num_tokens)

    short, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(args.short_rate)) < args.duration:
        short.append((now_s, prompt(args.short_tokens)))
    gap_s = args.duration / args.long_prompts
    return Plan(short, [(i * gap_s, prompt(args.long_tokens)) for i in range(args.long_prompts)])


def _fill(model: str, directory: Path, plan: Plan, args: argparse.Namespace, console: Console) -> None:
    with (
        console.status("storing the long prompts"),
        StoreProcess(directory) as store,
        SGLangServer(model, extra_args=hicache_args(store.url, codec=args.codec, merge=False)) as server,
    ):
        for number, (_, prompt) in enumerate(plan.long, 1):
            server.generate(input_ids=prompt, max_new_tokens=1)
            wait_until_written(server, number * (len(prompt) // PAGE_SIZE))


def _measure(mode: str, model: str, directory: Path, plan: Plan, args: argparse.Namespace) -> Sample:
    env = {"PYTHONPATH": str(_BLOCKING)} if mode == "blocking" else {}
    with (
        StoreProcess(directory, extra_args=["--link-gbps", str(args.link_gbps)]) as store,
        SGLangServer(model, extra_args=_flags(mode, store.url), env=env) as server,
    ):
        server.generate(input_ids=[1] * args.short_tokens, max_new_tokens=args.new_tokens)  # warm up
        long = [] if mode == "none" else plan.long
        return asyncio.run(_send(server.url, plan.short, long, args.new_tokens))


def _flags(mode: str, url: str) -> list[str]:
    # Nothing is written, and a fetch may take as long as the link asks for.
    settings: Mapping[str, Any] = {"mode": "read_only", "fetch_timeout_s": _LONG_TIMEOUT_S}
    match mode:
        case "none":
            return []
        case "host":
            return hicache_args(url, **settings)
    return device_args(url, **settings)


async def _send(
    url: str, short: Sequence[tuple[float, list[int]]], long: Sequence[tuple[float, list[int]]], new_tokens: int
) -> Sample:
    timeout = aiohttp.ClientTimeout(total=_LONG_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    started_s = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(start_s: float, prompt: list[int], num_new: int) -> Answer:
            await asyncio.sleep(max(0.0, started_s + start_s - time.perf_counter()))
            return await stream_generate(session, url, prompt, num_new)

        answers, long_answers = await asyncio.gather(
            asyncio.gather(*(one(start_s, prompt, new_tokens) for start_s, prompt in short)),
            asyncio.gather(*(one(start_s, prompt, 1) for start_s, prompt in long)),
        )
    return Sample(
        [a.ttft_s for a in answers],
        [a.tpot_s for a in answers if a.tpot_s is not None],
        [a.ttft_s for a in long_answers],
        [a.cached.storage for a in long_answers],
    )


def _rows(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Percentiles are over all of a mode's requests; ratios are medians over rounds, each against its own ``none``."""
    rows = []
    for mode, runs in samples.items():
        row: dict[str, Any] = {"name": mode}
        for name in ("ttft_s", "tpot_s"):
            values = np.concatenate([getattr(run, name) for run in runs])
            row[name] = {f"p{p}": float(np.percentile(values, p)) for p in (50, 95)}
            ratios = [
                float(np.median(getattr(run, name)) / np.median(getattr(none, name)))
                for run, none in zip(runs, samples["none"], strict=True)
            ]
            row[f"ratio_{name.removesuffix('_s')}_p50"] = statistics.median(ratios)
            row[f"ratios_{name.removesuffix('_s')}_p50"] = ratios
        long = [s for run in runs for s in run.long_ttft_s]
        row["long_ttft_s"] = statistics.median(long) if long else None
        row["long_storage_tokens"] = [n for run in runs for n in run.long_storage_tokens]
        rows.append(row)
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="short requests while long prompts are fetched")
    for column in (
        "",
        "TTFT p50",
        "p95",
        "to none",
        "TPOT p50",
        "p95",
        "to none",
        "TTFT of the long",
        "from the store",
    ):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cells = [row["name"]]
        for name in ("ttft", "tpot"):
            cells += [f"{row[name + '_s'][p] * 1e3:.1f} ms" for p in ("p50", "p95")]
            cells.append(f"{row[f'ratio_{name}_p50']:.2f}x")
        stored = row["long_storage_tokens"]
        cells.append(f"{row['long_ttft_s']:.2f} s" if stored else "")
        cells.append(f"{statistics.mean(stored):.0f} tokens" if stored else "")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
