"""Measures the time to first token of requests that come at once, each with a stored prefix of its own. The link
carries about one prefix in the time that the engine takes to compute one.

    python -m benchmarks.burst [--mode host,device] [--stored ours] [--requests N] [--tokens N] [--gbps N[,N...]]

* computing: without a store;
* always fetched: `recompute` is `never`;
* ours: by default. Each prefix is fetched or computed, whichever is sooner.

Several values of ``--gbps`` hold for one second each, repeated: with ``0.02,0.002``, the link falls to a tenth in the
midst of fetches. ``--stored`` is a method of `benchmarks.ttft`: what the store has. Before each burst, one prompt
measures the link.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.machine import fast_dtype, machine, versions
from benchmarks.report import make_parser, make_table, run_and_report, settings, whole_number
from benchmarks.stats import distribution
from benchmarks.ttft import (
    COMPUTING,
    MODES,
    TIMEOUT_S,
    add_model_arguments,
    make_prompts,
    methods,
    model_and_profile,
    numbers,
    store_all,
)
from harness.engine import SGLangServer, free_port
from harness.metrics import read_metric
from harness.store_process import StoreProcess

_WARM_UP = 4  # prompts that are computed first, so that a server knows its speed


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.burst", __doc__)
    parser.add_argument("--mode", choices=[*MODES, "host,device"], default="host,device")
    add_model_arguments(parser)
    parser.add_argument("--stored", choices=[name for name in methods(Path()) if name != COMPUTING], default="ours")
    parser.add_argument("--requests", type=whole_number, default=16)
    parser.add_argument("--tokens", type=whole_number, default=1024, help="of each prompt")
    parser.add_argument("--gbps", type=numbers, default="0.02", help="the link")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return run_and_report(run, parser.parse_args(argv), 100)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    model, profile = model_and_profile(args)
    asked = argparse.Namespace(tokens=[args.tokens], prompts=args.requests, text=args.text, part=args.part)
    prompts = make_prompts(model, asked)[args.tokens]
    rows: list[dict[str, Any]] = []
    config = {**(methods(profile)[args.stored] or {}), "fetch_timeout_s": TIMEOUT_S}
    with TemporaryDirectory(prefix="kvfetch-burst-") as folder:
        port = free_port()

        def launch(make_flags: Callable[..., list[str]] | None, **keys: Any) -> SGLangServer:
            flags = ["--dtype", fast_dtype(), "--context-length", str(args.tokens + 64)]
            flags += ["--max-total-tokens", str((args.requests + 2) * (args.tokens + 64))]
            flags += ["--chunked-prefill-size", str(args.tokens + 64), "--max-running-requests", str(args.requests)]
            if make_flags is not None:
                flags += make_flags(f"http://127.0.0.1:{port}", **config | keys)
            return SGLangServer(model, extra_args=flags, request_timeout_s=2 * TIMEOUT_S)

        console.print("storing the prompts")
        with StoreProcess(folder, port=port), launch(MODES["device"]) as server:
            store_all(server, prompts)
        ways: list[tuple[str, str, Callable[..., list[str]] | None, dict[str, Any]]] = [(COMPUTING, "", None, {})]
        for mode in args.mode.split(","):
            ways.append(("always fetched", mode, MODES[mode], {"recompute": "never"}))
            ways.append(("ours", mode, MODES[mode], {"recompute": "auto"}))
        for name, mode, make_flags, keys in ways:
            with launch(make_flags, mode="read_only", **keys) as server:
                row = {"way": name, "mode": mode} | _measure(server, prompts, folder, port, args.gbps)
            console.print(f"{name} {mode}: p50 {row['p50_s']:.2f} s, p95 {row['p95_s']:.2f} s")
            rows.append(row)
    console.print(make_table(f"Time to first token of {args.requests} requests at once, s", *_cells(rows)))
    return {
        "benchmark": "burst",
        "settings": settings(args),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _measure(
    server: SGLangServer, prompts: Sequence[list[int]], folder: str, port: int, gbps: Sequence[float]
) -> dict[str, Any]:
    first, *burst = prompts
    with StoreProcess(folder, port=port):
        for prompt in prompts[:_WARM_UP]:
            server.generate(input_ids=prompt[::-1], max_new_tokens=1)
    with StoreProcess(folder, port=port, link_gbps=gbps):
        server.generate(input_ids=first, max_new_tokens=1)
        server.flush()
        with ThreadPoolExecutor(len(burst)) as pool:
            answers = list(pool.map(lambda prompt: server.generate(input_ids=prompt, max_new_tokens=1), burst))
        recomputed = read_metric(server.metrics(), "sgl_kvfetch_recomputed_tokens_total")
    times = sorted(answer.ttft_s for answer in answers)
    found = distribution(times)
    return {
        "p50_s": found.p50,
        "p95_s": found.p95,
        "ttft_s": times,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "recomputed_tokens": recomputed,
    }


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    cells = [
        [
            f"{row['way']} {row['mode']}".strip(),
            *(f"{row[key]:.2f}" for key in ("p50_s", "p95_s")),
            f"{row['ttft_s'][-1]:.2f}",
            f"{row['cached_tokens']:,}",
        ]
        for row in rows
    ]
    return ("", "p50", "p95", "longest", "tokens from the store"), cells


if __name__ == "__main__":
    sys.exit(main())
