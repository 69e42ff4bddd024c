"""Measures ``kvfetch serve`` from outside: real server processes, over real sockets.

    python -m benchmarks.store --json store.json --plot store.png

* serving: ranged reads beside nginx on the same file. Runs alternate, with one worker each;
* start: time until the first lookup is answered, and resident memory, with many segments and with none;
* lookups: their latency with many segments, while the store is idle, and while it evicts at full write load. Lookups
  are due at a fixed rate, and latency counts from there, so that a stall shows in all lookups that it delays;
* writes: segments (data and manifest) a second into an empty store.

The server runs on one core and the load clients on another. The client of the ranged reads has the kernel drop what it
receives, and costs almost nothing: a client that copies would be the limit, and make slow servers look good. Segments
are real, and as small as they can be, except for the one that is served beside nginx. Times include the file system's:
choose it with --directory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contention import CpuUse, other_cores
from benchmarks.machine import machine, versions
from benchmarks.processes import LOAD_CORE, SERVER_CORE, children_on
from benchmarks.report import make_parser, positive, settings, whole_number, whole_numbers, write_json
from benchmarks.store.catalogue import measure_lookups, measure_starts, measure_writes, prepare
from benchmarks.store.report import plot, print_report
from benchmarks.store.serving import measure_serving
from benchmarks.store.small import SEGMENTS_A_PROMPT

PARTS = ("serving", "start", "lookups", "writes")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False)
    if SERVER_CORE == LOAD_CORE:
        console.print("[yellow]Only one core: servers and clients take turns on it.[/]")
    with tempfile.TemporaryDirectory(prefix="kvfetch-store-", dir=args.directory) as folder:
        before = CpuUse.now()
        # This process only waits during the measurements, so it may share the server's core.
        with children_on(SERVER_CORE), console.status("") as status:
            results = _measure(args, Path(folder), status.update)
        _report(args, results, other_cores(before, CpuUse.now()), console)
        console.print("removing the files")  # which may take minutes
    return 0


def _report(args: argparse.Namespace, results: dict[str, Any], others: float, console: Console) -> None:
    print_report(results, console)
    if args.plot:
        plot(args.plot, results)
        console.print(f"wrote {args.plot}")
    if args.json:
        about = {"other_cores": others, "machine": machine(), "versions": versions()}
        write_json(args.json, {**settings(args), **results, **about})
        console.print(f"wrote {args.json}")


def _measure(args: argparse.Namespace, folder: Path, note: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "serving" in args.parts:
        results["serving"] = measure_serving(
            _made(folder / "serving"), args.sizes, args.connections, args.rounds, args.seconds, note
        )
    if {"start", "lookups"} & set(args.parts):
        many = folder / "many"
        results["first_start_s"] = prepare(many, args.segments, note)
        if "start" in args.parts:
            results["start"] = measure_starts(many, args.segments, args.rounds, note)
        if "lookups" in args.parts:
            results["lookups"] = measure_lookups(
                many, args.segments, args.lookup_rate, args.lookup_seconds, max(args.clients), note
            )
    if "writes" in args.parts:
        results["writes"] = measure_writes(_made(folder / "writes"), args.clients, args.rounds, args.seconds, note)
    return results


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.store", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to write the PNG of serving and lookups")
    parser.add_argument("--parts", type=_parts, default=PARTS, help="which to measure")
    parser.add_argument("--directory", type=Path, help="where the stores keep their files; else temporary files")
    parser.add_argument("--rounds", type=whole_number, default=5, help="runs of each measurement")
    parser.add_argument("--seconds", type=positive, default=2.0, help="of a run of serving and writes")
    parser.add_argument("--sizes", type=whole_numbers, default=[1, 4, 8], help="ranges served, in MiB")
    parser.add_argument("--connections", type=whole_numbers, default=[1, 4, 16], help="for serving")
    parser.add_argument("--segments", type=whole_number, default=100_000, help="for start and lookups")
    parser.add_argument("--lookup-rate", type=positive, default=100.0, help="lookups a second")
    parser.add_argument("--lookup-seconds", type=positive, default=20.0, help="of lookups")
    parser.add_argument("--clients", type=whole_numbers, default=[1, 8], help="writers at a time")
    args = parser.parse_args(argv)
    if args.segments % SEGMENTS_A_PROMPT:
        parser.error(f"--segments: expected a multiple of {SEGMENTS_A_PROMPT}")
    if args.lookup_rate * args.lookup_seconds < 1:
        parser.error("--lookup-rate and --lookup-seconds: expected at least one lookup")
    return args


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown are {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
