"""Simulates fetches that leave levels of coefficients out when a link is too slow.

    python -m benchmarks.adaptive.levels [--trace FILE] [--within 1] [--random 1000] [--seed 0]

Compares all levels, always the fewest, our policy, and an oracle that knows the link's future and leaves out what costs
least for the time that it saves. Bits and divergences are those that docs/bits.md has for SmolLM2-135M, the number of
values a token is that of Llama-3.1-8B. Only the link is simulated: decoding takes no time.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.scenarios import CHUNK_TOKENS, GBPS, draw_traces, read_traces
from benchmarks.report import make_parser, make_table, no_traceback, positive, settings, whole_number, write_json
from sgl_kvfetch.plane.fetch.offers import Offer, Supply, best_offer

BITS_A_VALUE = 0.202, 0.541, 1.203  # with one, two and three levels
KL = 2.3e-2, 4.6e-3, 7.1e-4
_VALUES_A_TOKEN = 2 * 32 * 8 * 128
_RUNS_A_CHUNK = 64  # of neighbouring cells: a quarter of a span of 512 tokens
_RUN_BYTES = tuple(bits / 8 * _VALUES_A_TOKEN * CHUNK_TOKENS / _RUNS_A_CHUNK for bits in BITS_A_VALUE)
_IN_FLIGHT_S = 0.05  # a fetcher asks for so much more than has arrived
_NUM_RATED = 16  # runs by whose times the link is judged

Choose = Callable[[int, float, float, float | None], int]


@dataclass(frozen=True, slots=True)
class Link:
    """``chunk_bps``: bits per second while each chunk is on the link; the trace repeats. ``num_runs``: of cells."""

    chunk_bps: tuple[float, ...]
    num_runs: int

    def seconds(self, run: int, num_levels: int) -> float:
        chunk_bps = self.chunk_bps[run // _RUNS_A_CHUNK % len(self.chunk_bps)]
        return _RUN_BYTES[num_levels - 1] * 8 / chunk_bps


@dataclass(frozen=True, slots=True)
class Fetch:
    """``levels``: how many each run of cells has arrived with."""

    end_s: float
    levels: tuple[int, ...]

    @property
    def kl(self) -> float:
        return statistics.fmean(KL[count - 1] for count in self.levels)


def fetch(link: Link, choose: Choose) -> Fetch:
    """Ask for one run after the other. ``choose`` gets the runs that are left, the time, the bytes on the way and
    the measured bytes per second, and returns how many levels to ask for."""
    now_s = link_free_s = 0.0
    on_the_way: deque[tuple[float, int]] = deque()  # when runs arrive, and with how many levels
    rated: deque[tuple[float, float]] = deque(maxlen=_NUM_RATED)  # bytes and seconds
    levels: list[int] = []
    for run in range(link.num_runs):
        rate = sum(size for size, _ in rated) / sum(seconds for _, seconds in rated) if rated else None
        room = _RUN_BYTES[0] if rate is None else rate * _IN_FLIGHT_S
        while on_the_way and (on_the_way[0][0] <= now_s or sum(_RUN_BYTES[n - 1] for _, n in on_the_way) > room):
            now_s = max(now_s, on_the_way.popleft()[0])
            first = run - len(on_the_way) - 1
            rated.append((_RUN_BYTES[levels[first] - 1], link.seconds(first, levels[first])))
        outstanding = sum(_RUN_BYTES[n - 1] for _, n in on_the_way)
        levels.append(choose(link.num_runs - run, now_s, outstanding, rate))
        link_free_s = max(link_free_s, now_s) + link.seconds(run, levels[-1])
        on_the_way.append((link_free_s, levels[-1]))
    return Fetch(link_free_s, tuple(levels))


def always(num_levels: int) -> Choose:
    return lambda *_: num_levels


def in_time(num_levels: int, most_left_out: int, within_s: float) -> Choose:
    """Choose as a fetcher does."""
    offers = [Offer(cast(Any, None), round(_RUN_BYTES[num_levels - n - 1]), n) for n in range(most_left_out + 1)]

    def choose(num_left: int, now_s: float, outstanding: float, rate: float | None) -> int:
        supply = Supply(num_left, int(outstanding), rate, None)
        return num_levels - best_offer(offers, supply, within_s - now_s, lambda alike: alike[0]).levels_left_out

    return choose


def oracle(link: Link, num_levels: int, most_left_out: int, within_s: float) -> Fetch:
    """Return a fetch that ends in time, if any does, at about the least divergence: levels are left out one by one,
    those first that save most time for what they cost. Steps cost more and save less the fewer levels are left, so
    this is the best but for the last step."""
    levels = [num_levels] * link.num_runs
    end_s = sum(link.seconds(run, num_levels) for run in range(link.num_runs))

    def step(run: int) -> tuple[float, int, float]:
        n = levels[run]
        saved_s = link.seconds(run, n) - link.seconds(run, n - 1)
        return (KL[n - 2] - KL[n - 1]) / saved_s, run, saved_s

    steps = [step(run) for run in range(link.num_runs)]
    heapq.heapify(steps)
    while steps and end_s > within_s:
        _, run, saved_s = heapq.heappop(steps)
        levels[run] -= 1
        end_s -= saved_s
        if levels[run] > num_levels - most_left_out:
            heapq.heappush(steps, step(run))
    return Fetch(end_s, tuple(levels))


@dataclass
class Result:
    name: str
    fetches: list[Fetch] = field(default_factory=list)

    def row(self, within_s: float) -> dict[str, Any]:
        times = sorted(each.end_s for each in self.fetches)
        lacking = [sum(each.levels.count(n) for each in self.fetches) for n in range(len(KL), 0, -1)]
        return {
            "policy": self.name,
            "p50_s": statistics.median(times),
            "p95_s": times[-1 - len(times) // 20],
            "in_time": statistics.fmean(each.end_s <= 1.05 * within_s for each in self.fetches),
            "shares_lacking": [count / sum(lacking) for count in lacking],
            "kl": statistics.fmean(each.kl for each in self.fetches),
        }


def fetch_all(links: Sequence[Link], most_left_out: int, within_s: float) -> list[Result]:
    """Return the results of all policies, where up to ``most_left_out`` of three levels may be left out."""
    whole, fewest = len(KL), len(KL) - most_left_out
    results = [Result("all levels"), Result("always the fewest"), Result("ours"), Result("oracle")]
    for link in tqdm(links, unit="fetch", disable=not sys.stderr.isatty()):
        found = (
            fetch(link, always(whole)),
            fetch(link, always(fewest)),
            fetch(link, in_time(whole, most_left_out, within_s)),
            oracle(link, whole, most_left_out, within_s),
        )
        for result, each in zip(results, found, strict=True):
            result.fetches.append(each)
    return results


def _links(args: argparse.Namespace) -> Iterator[tuple[str, list[Link]]]:
    if args.trace:
        traces = [tuple(gbps * GBPS for gbps in line) for _, line in read_traces(args.trace)]
        yield args.trace.name, [Link(trace, len(trace) * _RUNS_A_CHUNK) for trace in traces]
    if args.random:
        drawn = draw_traces(list(PUBLISHED.values()), args.random, args.seed, None)
        links = [Link(x.scenario.bandwidth_bps, x.scenario.num_chunks * _RUNS_A_CHUNK) for x in drawn]
        yield f"{args.random} random links", links


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.adaptive.levels", __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help='lines {"bw": [Gbps, ...]}, one sample per chunk')
    parser.add_argument("--within", type=positive, default=1.0, help="levels.within_s")
    parser.add_argument("--random", type=whole_number, default=1000, metavar="N", help="random traces")
    parser.add_argument("--seed", type=int, default=0, help="for the random traces")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures here")
    args = parser.parse_args(argv)
    groups = []
    with no_traceback():
        for name, links in _links(args):
            for most_left_out in range(1, len(KL)):
                rows = [each.row(args.within) for each in fetch_all(links, most_left_out, args.within)]
                groups.append({"links": name, "most_left_out": most_left_out, "rows": rows})
                Console(width=120).print(_table(f"{name}; up to {most_left_out} left out", rows))
    if args.json:
        report = {"benchmark": "adaptive.levels", "simulated": True, "config": settings(args), "groups": groups}
        write_json(args.json, report)
    return 0


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("policy", "p50", "p95", "in time", "runs that lack 0, 1, 2 levels", "KL")
    texts = [
        (
            row["policy"],
            f"{row['p50_s']:.2f} s",
            f"{row['p95_s']:.2f} s",
            f"{row['in_time']:.0%}",
            " ".join(f"{share:.0%}" for share in row["shares_lacking"]),
            f"{row['kl']:.1e}",
        )
        for row in rows
    ]
    return make_table(title, columns, texts)


if __name__ == "__main__":
    sys.exit(main())
