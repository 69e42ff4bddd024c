"""Measures how much of our policy's loss no policy could avoid, because it cannot know the future.

    python -m benchmarks.adaptive.told [--random 1000] [--seed 0]

The goal *never more than 2% over the best fixed variant* is judged afterwards, with the whole trace known. Here our
policy is compared with one that is told what no fetcher knows: the link's level, and the random process that the trace
is drawn from. It does not know the future either. It looks ahead as ours does, but over scenarios from this process.
For jumps, the present bandwidth goes on for a random number of chunks, 3 on average, before the next jump.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.adaptive.policies import Fixed
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.scenarios import GBPS, KINDS, RandomTrace, draw_traces
from benchmarks.adaptive.simulator import simulate
from benchmarks.report import make_parser, make_table
from sgl_kvfetch.plane.adapt.estimate import Transfer
from sgl_kvfetch.plane.adapt.policy import LookAhead, Policy

_NUM_PATHS = 16
_OVER = 1.02


@dataclass(frozen=True)
class Law:
    """The future of a link of one kind, given its past transfers. Implements ``policy.Outlook``."""

    kind: str
    level_gbps: float
    seen: Sequence[Transfer]

    def paths(self, num_chunks: int) -> list[list[float]]:
        rng = random.Random(len(self.seen))
        factors = [self._factors(rng, num_chunks) for _ in range(_NUM_PATHS)]
        return [[self.level_gbps * GBPS * factor for factor in path] for path in factors]

    def _factors(self, rng: random.Random, count: int) -> list[float]:
        if not self.seen or self.kind in ("steady", "independent"):
            return KINDS[self.kind](rng, count)
        now = self.seen[-1].goodput_bps / GBPS / self.level_gbps
        if self.kind == "walk":
            return _walk_from(now, rng, count)
        return ([now] * rng.randint(0, 6) + KINDS[self.kind](rng, count))[:count]


def _walk_from(now: float, rng: random.Random, count: int) -> list[float]:
    """Continue a walk as ``scenarios`` draws it."""
    steps = itertools.accumulate(range(count), lambda log, _: 0.9 * log + rng.gauss(0, 0.2), initial=math.log(now))
    return [math.exp(log) for log in steps][1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.adaptive.told", __doc__)
    parser.add_argument("--random", type=int, default=1000, metavar="N", help="traces")
    parser.add_argument("--seed", type=int, default=0, help="for the traces")
    args = parser.parse_args(argv)
    traces = draw_traces(list(PUBLISHED.values()), args.random, args.seed, None)
    ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in sorted(KINDS)}
    for trace in tqdm(traces, unit="trace", disable=not sys.stderr.isatty()):
        ratios[trace.kind].append((_to_best_fixed(trace, LookAhead()), _to_best_fixed(trace, _told(trace))))
    Console(highlight=False).print(_table(ratios))
    return 0


def _told(trace: RandomTrace) -> LookAhead:
    return LookAhead(name="told", outlook=partial(Law, trace.kind, trace.level_gbps))


def _to_best_fixed(trace: RandomTrace, policy: Policy) -> float:
    scenario = trace.scenario
    fixed = (simulate(scenario, Fixed(i, v.name)).end_s for i, v in enumerate(scenario.profile.variants))
    return simulate(scenario, policy).end_s / min(fixed)


def _table(ratios: dict[str, list[tuple[float, float]]]) -> Table:
    rows = []
    for kind, pairs in {**ratios, "all": list(itertools.chain.from_iterable(ratios.values()))}.items():
        columns = list(zip(*pairs, strict=True)) or [(math.nan,)] * 2
        means = (f"{statistics.fmean(values):.4f}" for values in columns)
        rows.append((kind, str(len(pairs)), *means, *(str(sum(v > _OVER for v in values)) for values in columns)))
    titles = ("link", "traces", "ours, mean", "told, mean", "ours, over 1.02", "told, over 1.02")
    return make_table("time against the best fixed variant of each trace", titles, rows)


if __name__ == "__main__":
    sys.exit(main())
