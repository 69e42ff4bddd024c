"""Prints the results of a soak."""

from __future__ import annotations

from typing import Any

from rich.console import Console

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
    if results["attacks"]:
        console.print(f"attacks: {', '.join(f'{count} {answer}' for answer, count in results['attacks'].items())}")
        console.print(f"most memory of the server: {results['last']['peak_rss_bytes'] / _MIB:.0f} MiB")
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
