"""A long time of a store's life in a short one: 16 clients, evictions, deletions, crashes and full disks.

    python -m benchmarks.soak --minutes 15 --clients 16 --json soak.json

Clients read, write, replace and delete at random; some give up halfway, leave data without a manifest, or read over a
slow link. Their working set is four times the capacity. In the first half, the server is killed (SIGKILL) and started
again now and then. In the second half it runs on, so that memory can be compared. From time to time its disk is
full, where root may mount a small tmpfs for it.

It is a failure, and the exit code is 1, if

* anything read differs from what was written: data, manifests, or the pages of a hit;
* a segment is lost that was committed right before a kill;
* an operation fails for which no kill or full disk is the reason, or a lookup takes longer than --longest-lookup;
* memory or open files grow, or the files (with deleted ones that the server holds open) exceed capacity by 8 MiB;
* in the end, anything is left that no segment needs, `kvfetch verify` finds a fault, or the log has a traceback.

--seed fixes what is written, what each client does in which order, and the pauses between kills. How the clients meet
is left to chance.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.report import make_parser, write_json
from benchmarks.soak.disk import any_disk, small_disk
from benchmarks.soak.run import Settings, Soak
from benchmarks.soak.world import World

_TMPFS_TO_CAPACITY = 2
_FEWEST_MINUTES = 0.1
_WORKING_SET = 4  # in capacities


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if anything was wrong. Without figures if the store did not even run."""
    args = _parse(argv)
    console = Console(highlight=False)
    settings = Settings(
        duration_s=args.minutes * 60,
        clients=args.clients,
        slow_readers=args.slow_readers,
        capacity_bytes=args.capacity << 20,
        longest_lookup_s=args.longest_lookup,
        fills_disk=os.geteuid() == 0,
        seed=args.seed,
    )
    with console.status("making segments"):
        world = World(_WORKING_SET * settings.capacity_bytes, args.seed)
    try:
        disk = small_disk(_TMPFS_TO_CAPACITY * settings.capacity_bytes) if settings.fills_disk else any_disk()
        with disk as opened, console.status("running"):
            results = asyncio.run(Soak(settings, world, opened).run())
    except RuntimeError as e:
        console.print(str(e), style="red", markup=False, soft_wrap=True)
        return 1
    print_report(results, console)
    if args.json:
        write_json(args.json, report.settings(args) | results)
        console.print(f"wrote {args.json}")
    return 1 if results["problems"] else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long")
    parser.add_argument("--clients", type=int, default=16, help="how many")
    parser.add_argument("--slow-readers", type=int, default=32, help="how many")
    parser.add_argument("--capacity", type=int, default=64, metavar="MIB", help="of the store")
    parser.add_argument("--longest-lookup", type=float, default=5.0, metavar="S", help="a slower one is a failure")
    parser.add_argument("--seed", type=int, default=0, help="see above")
    parser.add_argument("--json", type=report.output_file, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    if args.minutes < _FEWEST_MINUTES:
        parser.error(f"--minutes: expected at least {_FEWEST_MINUTES}")
    return args


_MIB = 1 << 20


def print_report(results: dict[str, Any], console: Console) -> None:
    for operation, outcomes in results["outcomes"].items():
        console.print(f"{operation}: {', '.join(f'{count} {result}' for result, count in outcomes.items())}")
    disturbances = results["disturbances"]
    console.print(f"{disturbances.get('killed', 0)} kills, {disturbances.get('full', 0)} times a full disk")
    lookup = results["lookup_s"]
    if lookup["max"] is not None:
        console.print(
            f"lookups: p50 {lookup['p50'] * 1e3:.1f} ms, p99 {lookup['p99'] * 1e3:.1f} ms, "
            f"longest {lookup['max'] * 1e3:.0f} ms (the clients share one core)"
        )
    grown, last = results["growth"], results["last"]
    console.print(
        f"since the last kill: memory {grown['rss_bytes'] / _MIB:+.1f} MiB to {last['rss_bytes'] / _MIB:.0f} MiB, "
        f"open files {grown['open_files']:+.1f}, disk {grown['disk_bytes'] / _MIB:+.1f} MiB"
    )
    console.print(f"most on disk: {results['most_disk_bytes'] / _MIB:.1f} MiB")
    verified = results["verified"]
    console.print(f"kvfetch verify: exit code {verified['exit_code']}, {verified['orphans']} orphans")
    for problem in results["problems"]:
        text = f"{problem['count']} x {problem['what']}, from {problem['first_s']:.0f} s on. {problem['example']}"
        console.print(text.rstrip(), style="red", markup=False, soft_wrap=True)
    if not results["problems"]:
        console.print("nothing was wrong")


if __name__ == "__main__":
    sys.exit(main())
