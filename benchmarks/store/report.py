"""Reports the measurements as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import COLOURS, figure, make_table
from benchmarks.store.serving import NO_NGINX

_TABLE_WIDTH = 110
_BUSY_CLIENT = 0.9  # cores; above this, the client may have been the limit
_SERVERS = ("store", "nginx")


def print_report(results: dict[str, Any], console: Console) -> None:
    console.width = max(console.width, _TABLE_WIDTH)
    if "serving" in results and results["serving"] is None:
        console.print(f"[yellow]{NO_NGINX}[/]")
    if results.get("serving"):
        console.print(_serving_table(results["serving"]))
        if any(row[f"{name}_client_cores"] > _BUSY_CLIENT for row in results["serving"]["rows"] for name in _SERVERS):
            console.print("[yellow]The client's core was busy in some rows: the servers may be faster.[/]")
    if "first_start_s" in results:
        console.print(f"First start, until all segments are indexed: {results['first_start_s']:.1f} s")
    if "start" in results:
        for name, start in results["start"].items():
            console.print(
                f"Start, {name} store: first lookup answered after {start['first_lookup_s']:.2f} s, "
                f"{start['rss_bytes'] / 1e6:.0f} MB resident"
            )
    if "lookups" in results:
        console.print(_lookups_table(results["lookups"]))
    for row in results.get("writes", []):
        rates = [run["segments_per_s"] for run in row["runs"]]
        failed = sum(sum(run["write_errors"].values()) for run in row["runs"])
        console.print(
            f"Writes, {row['clients']} at a time: {row['segments_per_s']:.0f} segments/s "
            f"({min(rates):.0f} to {max(rates):.0f}), {failed} failed"
        )


def _serving_table(serving: dict[str, Any]) -> Table:
    columns = ("MiB, connections", "store", "nginx", "ratio (range)", "store, CPU", "nginx, CPU", "client")
    rows = [
        (
            f"{row['range_mib']}, {row['connections']}",
            *(f"{row[f'{name}_gb_per_s']:.2f} GB/s" for name in _SERVERS),
            f"{row['ratio']:.0%} ({min(row['ratios']):.0%} to {max(row['ratios']):.0%})",
            *(f"{row[f'{name}_cpu_s_per_gb']:.2f} s/GB" for name in _SERVERS),
            f"{max(row[f'{name}_client_cores'] for name in _SERVERS):.0%}",
        )
        for row in serving["rows"]
    ]
    return make_table(f"Ranged reads, beside nginx {serving['nginx']}", columns, rows)


def _lookups_table(lookups: dict[str, Any]) -> Table:
    rows = [
        (
            name,
            *(f"{lookups[name][key] * 1e3:.1f} ms" for key in ("p50_s", "p99_s", "max_s")),
            f"{lookups[name]['share_found']:.0%}",
            f"{lookups[name]['rss_bytes'] / 1e6:.0f} MB",
        )
        for name in ("idle", "evicting")
    ]
    columns = ("store", "p50", "p99", "max", "pages found", "resident")
    table = make_table(f"Lookups, {lookups['lookups_per_s']:g} a second", columns, rows)
    written = lookups["evicting"]
    table.caption = (
        f"while evicting: {written['segments_per_s']:.0f} segments/s written, "
        f"{written['evicted_segments']} evicted, {sum(written['write_errors'].values())} writes failed"
    )
    return table


def plot(path: Path, results: dict[str, Any]) -> None:
    """Plot serving and lookups, as far as they were measured, as a PNG."""
    rows = results["serving"]["rows"] if results.get("serving") else []
    ticks = [f"{row['range_mib']} MiB\n{row['connections']}" for row in rows]
    with figure(path, "kvfetch serve", columns=3, figsize=(15, 4.5)) as (_, ((speed, cpu, lookups),)):
        for axes, field, label in ((speed, "gb_per_s", "GB/s"), (cpu, "cpu_s_per_gb", "CPU seconds a GB")):
            for offset, name, colour in zip((-0.2, 0.2), _SERVERS, COLOURS, strict=False):
                places = [place + offset for place in range(len(rows))]
                axes.bar(places, [row[f"{name}_{field}"] for row in rows], 0.4, color=colour, label=name)
            axes.set_xticks(range(len(rows)), ticks, fontsize=8)
            axes.set(ylabel=label, xlabel="range, connections", title=f"Serving: {label}")
            axes.legend()
        if "lookups" in results:
            for name, colour in zip(("idle", "evicting"), COLOURS[2:], strict=False):
                milliseconds = [seconds * 1e3 for seconds in results["lookups"][name]["latencies_s"]]
                lookups.ecdf(milliseconds, color=colour, label=name, lw=2)
            lookups.set(xscale="log", xlabel="ms", ylabel="share of lookups", title="Lookups")
            lookups.legend(loc="lower right")
