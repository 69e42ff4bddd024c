"""Models many servers on one S3 store with an index, and says which limit they reach first.

python -m benchmarks.scaling --json scaling.json
python -m benchmarks.scaling --measure 250000     # with the index's costs measured here; needs redis-server
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from benchmarks.scaling.limits import CLUSTER, SINGLE, Fleet, limits, scale
from benchmarks.scaling.measure import measure
from benchmarks.scaling.workload import Simulation, Workload


def main(argv: Sequence[str] | None = None) -> None:
    options = _parse(argv)
    workload, fleet = _take(Workload, options), _take(Fleet, options)
    single, cluster = SINGLE, CLUSTER
    if options.measure:
        single, cluster = measure(options.measure, cluster=False), measure(options.measure, cluster=True)
    simulation = Simulation(workload).run()
    cold = Simulation(replace(workload, local_tokens=0)).run()
    result = {
        "fleet": asdict(fleet),
        "workload": asdict(workload),
        "index": {"single": asdict(single), "cluster": asdict(cluster)},
        "per_request": {k: v / simulation.costs.requests for k, v in asdict(simulation.costs).items()},
        "total": scale(simulation, fleet, single, cluster),
        "cold": scale(cold, fleet, single, cluster),
        "servers": limits(simulation, cold, fleet, single),
    }
    console = Console(highlight=False, width=110)
    console.print(f"Index: single server {single}, cluster {cluster}")
    rows: dict[str, tuple[float, ...]] = {
        name: (value, result["cold"][name]) for name, value in result["total"].items()
    }
    _print(console, "All servers", ("with local caches", "without"), rows)
    _print(console, "Ends at", ("servers",), {name: (value,) for name, value in result["servers"].items()})
    if options.json is not None:
        write_json(options.json, result)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The options are the fields of Fleet (limits.py) and Workload (workload.py), which explain them.",
    )
    for field in (*fields(Fleet), *fields(Workload)):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help="default: %(default)s")
    parser.add_argument("--measure", type=int, metavar="PAGES", help="measure the index's costs with so many pages")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def _take(kind: Any, options: argparse.Namespace) -> Any:
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def _print(console: Console, title: str, columns: Sequence[str], rows: dict[str, tuple[float, ...]]) -> None:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name.replace("_", " "), *map(_number, values))
    console.print(table)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
