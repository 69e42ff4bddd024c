"""Measures the time to first token over links that change, with all levels of `klt` and with as many as come in time.

    python -m benchmarks.ttft_levels TRACES --scale 0.005 [--model PATH --profile FILE --text FILE] [--json OUT]

TRACES: lines {"bw": [Gbps, ...]}, each value for a second, repeated; a line is one link. CPUs compute a hundred times
slower than GPUs, so all values are multiplied by ``--scale``. A server stores every prompt in levels. Then two other
servers, which only read, and never compute instead, get each prompt over each link: one in all levels; one that may
leave levels out, up to ``--times`` the target's divergence, for what would take longer than ``--within``.

The divergence is that of the profile's calibration, weighted by the cells that were read so: not measured here.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.adaptive.scenarios import read_traces
from benchmarks.machine import fast_dtype, machine, versions
from benchmarks.real_model import real_model
from benchmarks.real_profile import PROMPTS_PART, real_profile
from benchmarks.report import make_parser, make_table, no_traceback, settings, whole_number, write_json
from benchmarks.traffic import kvfetch_traffic
from benchmarks.ttft import TIMEOUT_S, make_prompts, store_all
from harness.engine import SGLangServer, device_args, free_port
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile

ALL, IN_TIME = "all levels", "in time"


@dataclass(frozen=True)
class Row:
    """One method's results over all links and prompts."""

    method: str
    ttft_s: tuple[float, ...]
    wire_bytes: int  # mean per prompt
    shares: tuple[float, ...]  # of cells, by how many levels they lack
    kl: float  # as calibrated

    @property
    def p95_s(self) -> float:
        """Return the 95th percentile, by nearest rank."""
        return sorted(self.ttft_s)[math.ceil(0.95 * len(self.ttft_s)) - 1]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    with no_traceback():
        model = Path(args.model) if args.model else real_model()
        profile = Path(args.profile) if args.profile else real_profile()
        links = [[gbps * args.scale for gbps in line] for _, line in read_traces(args.traces)][: args.links]
        rows = list(_measure(model, profile, links, args))
    cells = [
        (
            row.method,
            f"{statistics.median(row.ttft_s):.2f}",
            f"{row.p95_s:.2f}",
            f"{row.wire_bytes / 1e6:.2f}",
            " ".join(f"{share:.0%}" for share in row.shares),
            f"{row.kl:.1e}",
        )
        for row in rows
    ]
    columns = ("method", "p50", "p95", "MB on the wire", "cells that lack 0, 1, ... levels", "KL, as calibrated")
    Console().print(make_table("Time to first token in s", columns, cells))
    if args.json:
        report = {"benchmark": "ttft_levels", "config": settings(args), "dtype": fast_dtype(), "machine": machine()}
        write_json(args.json, report | {"versions": versions(), "rows": [asdict(row) for row in rows]})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.ttft_levels", __doc__)
    parser.add_argument("traces", type=Path, help="links, one a line")
    parser.add_argument("--scale", type=float, default=0.005, help="factor for all speeds")
    parser.add_argument("--links", type=whole_number, default=10, help="lines of the file that are used")
    parser.add_argument("--within", type=float, default=0.5, help="levels.within_s")
    parser.add_argument("--times", type=float, default=10, help="levels.max_kl, in targets")
    parser.add_argument("--count", type=whole_number, default=2, help="levels.count")
    parser.add_argument("--model", help="a model's directory; else the real model")
    parser.add_argument("--profile", help="that model's profile by kvfetch calibrate")
    parser.add_argument("--text", type=Path, help="text to cut prompts from; else Python's reference")
    parser.add_argument("--part", default=PROMPTS_PART, help="part of the text")
    parser.add_argument("--length", type=whole_number, default=1024, help="tokens of a prompt")
    parser.add_argument("--prompts", type=whole_number, default=2, help="prompts over each link")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.profile):
        parser.error("--model and --profile need each other")
    args.tokens = [args.length]
    return args


def _measure(
    model: Path, profile_path: Path, links: Sequence[Sequence[float]], args: argparse.Namespace
) -> Iterator[Row]:
    prompts = make_prompts(model, args)[args.length]
    profile = load_profile(profile_path)
    target, step = profile.default_target_kl, KltQuantiser(profile).step
    costs = [target, *(profile.kl_of(step * 3**count) for count in range(1, args.count))]
    port = free_port()

    def launch(mode: str, **levels: float) -> SGLangServer:
        config: dict[str, Any] = {"profile": str(profile_path.absolute()), "mode": mode, "fetch_timeout_s": TIMEOUT_S}
        config["levels"] = {"count": args.count} | levels
        length = args.length
        flags = ["--dtype", fast_dtype(), "--context-length", str(length + 64), "--max-total-tokens", str(4 * length)]
        flags += device_args(f"http://127.0.0.1:{port}", **config)
        return SGLangServer(model, extra_args=flags, request_timeout_s=2 * TIMEOUT_S)

    with tempfile.TemporaryDirectory(prefix="kvfetch-ttft-levels-") as folder:
        with StoreProcess(folder, port=port), launch("read_write") as server:
            store_all(server, prompts)
        for method, levels in ((ALL, {}), (IN_TIME, {"max_kl": args.times * target, "within_s": args.within})):
            with launch("read_only", **levels) as server:
                times: list[float] = []
                wire_bytes, cells = 0, [0.0] * args.count
                for link in links:
                    with StoreProcess(folder, port=port, link_gbps=link):
                        for number, prompt in enumerate(prompts):
                            before = server.metrics()
                            server.flush()
                            answer = server.generate(input_ids=prompt, max_new_tokens=1)
                            if number == 0:
                                continue  # it opens connections and learns the link's speed
                            after = server.metrics()
                            times.append(answer.ttft_s)
                            wire_bytes += kvfetch_traffic(before, after).wire_bytes
                            cells = [n + _cells(after, i) - _cells(before, i) for i, n in enumerate(cells)]
            shares = tuple(n / sum(cells) for n in cells)
            kl = sum(share * cost for share, cost in zip(shares, costs, strict=True) if share)
            yield Row(method, tuple(times), wire_bytes // len(times), shares, kl)


def _cells(metrics: str, levels_left_out: int) -> float:
    return read_metric(metrics, "sgl_kvfetch_read_cells_total", levels_left_out=str(levels_left_out))


if __name__ == "__main__":
    sys.exit(main())
