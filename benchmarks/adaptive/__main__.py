"""Simulates fetches on links and GPUs that we do not have.

    python -m benchmarks.adaptive --trace FILE --json OUT

Compares each resolution fixed, KVFetcher's algorithm 1, our own policy, and an oracle that knows the link's future.
Nothing is measured here; only the tables of --profile are measurements.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from benchmarks.adaptive.judge import Judged, judge, make_report, summary_table
from benchmarks.adaptive.plot import plot_speedup, plot_timelines
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.scenarios import (
    Group,
    grid,
    no_profile,
    one_fetch,
    paper_scene,
    random_traces,
    several_fetches,
    trace_file,
    wrong_profile,
)
from benchmarks.report import make_parser, no_traceback, whole_number, write_json
from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile, load_decode_profile

_TABLE_WIDTH = 160
# Bounds of the oracle's exhaustive search. Where link and decoders are equally fast, even more nodes prove nothing.
_MAX_NODES, _MAX_NODES_OF_MANY = 1000, 30


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    with no_traceback():
        _benchmark(args, console)
    return 0


def _benchmark(args: argparse.Namespace, console: Console) -> None:
    started_s = time.monotonic()
    profiles = [PUBLISHED[name] for name in args.device] + [load_decode_profile(path) for path in args.profile]
    groups = _groups(args, profiles)
    judged: list[tuple[Group, list[Judged]]] = []
    total = sum(len(group.scenarios) for group in groups)
    with tqdm(total=total, unit="scenario", disable=not sys.stderr.isatty()) as bar:
        for group in groups:
            max_nodes = _MAX_NODES if len(group.scenarios) <= 30 else _MAX_NODES_OF_MANY
            found = []
            for scenario in group.scenarios:
                found.append(judge(scenario, max_nodes=max_nodes))
                bar.update()
            judged.append((group, found))
    duration_s = time.monotonic() - started_s
    console.print(summary_table(judged))
    if args.json:
        about = {"duration_s": duration_s, "trace": args.trace and str(args.trace), "seed": args.seed}
        write_json(args.json, make_report(judged, profiles) | about)
        console.print(f"wrote {args.json}")
    if args.plots:
        _plot(args, judged, profiles[0])
        console.print(f"wrote the plots in {args.plots}")
    console.print(f"simulated {total} scenarios in {duration_s:.0f} s")


def _groups(args: argparse.Namespace, profiles: list[DecodeProfile]) -> list[Group]:
    """Return the groups to simulate, that of the user's trace file first."""
    sessions = args.sessions
    groups = [trace_file(args.trace, profiles, sessions)] if args.trace else []
    if args.only_trace:
        return groups
    groups.append(paper_scene(profiles[0], sessions))
    if args.random:
        groups.append(random_traces(profiles, args.random, args.seed, sessions))
    groups.append(several_fetches(profiles, sessions))
    groups += [wrong_profile(profiles, factor, sessions) for factor in (2.0, 0.5)]
    groups.append(no_profile(profiles, sessions))
    return groups + [grid(profile, sessions) for profile in profiles]


def _plot(args: argparse.Namespace, judged: Sequence[tuple[Group, list[Judged]]], profile: DecodeProfile) -> None:
    args.plots.mkdir(parents=True, exist_ok=True)
    grids = {found[0].scenario.profile.device: found for group, found in judged if group.name.startswith("grid ")}
    if grids:
        plot_speedup(args.plots / "adaptive_speedup.png", grids)
    scene = paper_scene(profile, args.sessions).scenarios[1]
    match = one_fetch(f"20 Gbps, {profile.device}, 12 chunks", profile, [20.0], 12, args.sessions)
    timelines = [judge(scenario, max_nodes=_MAX_NODES_OF_MANY) for scenario in (scene, match)]
    plot_timelines(args.plots / "adaptive_timeline.png", timelines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.adaptive", __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help='lines {"bw": [Gbps, ...]}, one sample per chunk')
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw adaptive_speedup.png, adaptive_timeline.png")
    parser.add_argument(
        "--device", action="append", choices=PUBLISHED, help="a GPU from the paper's tables; may be repeated; else all"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a decode profile by `kvfetch decoders`, as another device; may be repeated",
    )
    parser.add_argument("--sessions", type=whole_number, metavar="N", help="decode sessions; else the profile's")
    parser.add_argument("--random", type=int, default=1000, metavar="N", help="random traces")
    parser.add_argument("--seed", type=int, default=0, help="for the random traces")
    parser.add_argument("--only-trace", action="store_true", help="run only the trace file's scenarios")
    args = parser.parse_args(argv)
    if args.only_trace and not args.trace:
        parser.error("--only-trace needs --trace")
    args.device = args.device or list(PUBLISHED)
    return args


if __name__ == "__main__":
    sys.exit(main())
