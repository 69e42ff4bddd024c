"""The command line of ``python -m benchmarks.adaptive``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adaptive.published import PUBLISHED

_DESCRIPTION = """\
Simulates fetches, with no real links or decoders: each resolution fixed, KVFetcher's algorithm 1, our own policy, and
an oracle that knows the link's future. Nothing is measured here; only the tables of --profile are measurements.

  python -m benchmarks.adaptive --trace FILE --json OUT
"""


@dataclass(frozen=True)
class Options:
    trace: Path | None
    json_path: Path | None
    plots: Path | None
    devices: tuple[str, ...]
    profiles: tuple[Path, ...]
    sessions: int | None
    random: int
    seed: int
    only_trace: bool


def parse_options(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help='lines {"bw": [Gbps, ...]}, one sample per chunk')
    parser.add_argument("--json", type=Path, metavar="OUT", dest="json_path", help="write all figures here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw adaptive_speedup.png, adaptive_timeline.png")
    parser.add_argument(
        "--device",
        action="append",
        choices=sorted(PUBLISHED),
        help="a GPU from the paper's tables; may be repeated (default: all of them)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a decode profile by `kvfetch profile`, as another device; may be repeated",
    )
    parser.add_argument("--sessions", type=_positive, metavar="N", help="decode sessions (default: from the profile)")
    parser.add_argument("--random", type=_count, default=1000, metavar="N", help="random traces (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the random traces (default: %(default)s)")
    parser.add_argument("--only-trace", action="store_true", help="run only the trace file's scenarios")
    args = parser.parse_args(argv)
    if args.only_trace and args.trace is None:
        parser.error("--only-trace needs --trace")
    return Options(
        trace=args.trace,
        json_path=args.json_path,
        plots=args.plots,
        devices=tuple(dict.fromkeys(args.device or ("H20", "L20", "A100"))),
        profiles=tuple(args.profile),
        sessions=args.sessions,
        random=args.random,
        seed=args.seed,
        only_trace=args.only_trace,
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
