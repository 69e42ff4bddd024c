"""Starts SGLang and a store, sends multi-turn conversations, and measures how long its users wait: with no cache, with
SGLang's file backend, and with kvfetch. `kvfetch bench` measures a server that runs already.

python -m benchmarks.sharegpt --dataset FILE [-- SGLANG ARGS]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.machine import machine
from benchmarks.report import make_parser, make_table, no_traceback, output_file, positive, whole_number, write_json
from benchmarks.sharegpt.backends import BACKENDS
from benchmarks.sharegpt.report import make_report, plot_ttft, table_rows
from benchmarks.sharegpt.runs import METHOD, Launcher
from benchmarks.sharegpt.workload import Workload
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.protocol.config import parse_config

_BUSY_SHARE = 0.1  # share of the cores above which to warn


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if requests failed. If interrupted, end with 128 + the signal's number."""
    args = parse(sys.argv[1:] if argv is None else argv)
    console = Console(soft_wrap=True, highlight=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    started_s = time.monotonic()
    console.print(METHOD)
    with no_traceback():
        workload = Workload(args, console)
        runs = Launcher(workload, args, console).runs()
    content = make_report(
        runs,
        duration_s=time.monotonic() - started_s,
        method=METHOD,
        dataset=_dataset_json(args, workload),
        server=asdict(workload.server) if workload.server else None,
        config=report.settings(args),
    )
    console.print(make_table("Measured phase", ("", *(run.name for run in runs)), table_rows(content["runs"])))
    _warn(content["runs"], console)
    if args.json:
        write_json(args.json, content)
        console.print(f"wrote {args.json}")
    if args.plot:
        plot_ttft(args.plot, runs, f"{args.dataset.name}: {workload.num_requests} requests")
        console.print(f"wrote {args.plot}")
    return 1 if any(run["failures"] for run in content["runs"]) else 0


def _warn(runs: Sequence[dict[str, Any]], console: Console) -> None:
    for run in runs:
        for error, count in run["errors"].items():
            console.print(f"{run['name']}: {count} x {error}", style="red", markup=False)
        if (others := run["other_cores"]) > _BUSY_SHARE * machine()["cores"]:
            console.print(
                f"[yellow]{run['name']}: other programs used {others:.1f} cores; do not rely on its times.[/]"
            )
    if len({run["prompts_digest"] for run in runs}) > 1:
        console.print("[red]The runs sent different prompts, because requests failed.[/]")
    if not torch.accelerator.is_available():
        console.print("No GPU: times are a CPU's, where video decoding competes with the model for the cores.")


def _dataset_json(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    return {
        "path": str(args.dataset),
        "kind": workload.dataset.kind,
        "conversations": len(workload.conversations),
        "requests": workload.num_requests,
        "max_input_tokens": workload.max_input_tokens,
        "token_ids": workload.token_ids,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. On an error, exit with a message that says what is wrong and what is allowed."""
    own, separator, sglang_args = list(argv), "--", []
    if separator in own:
        own, sglang_args = own[: own.index(separator)], own[own.index(separator) + 1 :]
    parser = make_parser("benchmarks.sharegpt", __doc__)
    data = parser.add_argument_group("conversations")
    data.add_argument(
        "--dataset",
        type=Path,
        required=True,
        help=".json: ShareGPT; .jsonl: lines with 'prompt' (or ShareGPT's 'conversations'); any other: text",
    )
    data.add_argument("--num-conversations", type=whole_number, default=8, metavar="N", help="at most")
    data.add_argument("--turns", type=whole_number, default=3, metavar="N", help="at most, for each")
    data.add_argument(
        "--max-input-tokens", type=whole_number, default=1500, metavar="N", help="the server's limit applies as well"
    )
    data.add_argument("--max-new-tokens", type=whole_number, default=16, metavar="N", help="of every answer")
    load = parser.add_argument_group("load")
    rate = load.add_mutually_exclusive_group()
    rate.add_argument(
        "--request-rate",
        type=positive,
        metavar="R",
        help="requests per second: conversations start as a Poisson process of that rate over the number of turns",
    )
    rate.add_argument("--concurrency", type=whole_number, default=2, metavar="N", help="conversations at a time")
    load.add_argument("--seed", type=int, default=0, help="for the Poisson process")
    load.add_argument("--timeout", type=positive, default=120.0, metavar="S", help="per request")
    launch = parser.add_argument_group("servers")
    launch.add_argument("--model", help="directory or name; a small random Llama, if not given")
    launch.add_argument("--backends", type=_backends, metavar="LIST", help=f"{','.join(BACKENDS)}, if not given")
    launch.add_argument(
        "--kvfetch", action="append", metavar="KEY=VALUE", help="a key of kvfetch's config; may be repeated"
    )
    launch.add_argument("--store", metavar="URL", help="an empty store is started for the run, if not given")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=output_file, metavar="FILE", help="where to write all figures")
    out.add_argument("--plot", type=output_file, metavar="FILE", help="where to write the PNG; else beside --json")
    args = parser.parse_args(own)
    args.sglang_args = sglang_args
    args.backends = args.backends or list(BACKENDS)
    if "kvfetch" not in args.backends and (args.store or args.kvfetch):
        parser.error("--store and --kvfetch need the backend kvfetch, which --backends leaves out")
    try:
        args.kvfetch = _kvfetch(args.kvfetch or [])
        parse_config({"store": args.store or "http://127.0.0.1:1", **args.kvfetch})
    except ConfigError as e:
        parser.error(str(e))
    args.plot = args.plot or (args.json.with_suffix(".png") if args.json else None)
    return args


def _backends(text: str) -> list[str]:
    names = text.split(",")
    if set(names) - set(BACKENDS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are {', '.join(BACKENDS)}, each once")
    return names


def _kvfetch(entries: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE, with values as JSON or as plain strings. Raises ConfigError."""
    config: dict[str, Any] = {}
    for entry in entries:
        key, separator, value = entry.partition("=")
        if not separator or not key or key == "store":
            raise ConfigError(f"--kvfetch {entry!r}: expected KEY=VALUE, such as codec=zstd; --store names a store")
        try:
            config[key] = json.loads(value)
        except json.JSONDecodeError:
            config[key] = value
    return config


def _end(signum: int, frame: object) -> NoReturn:
    # Raise an exception, so that servers, store and directories are cleaned up as usual.
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
