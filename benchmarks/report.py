"""Reports the runs as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.measure import Run, Workload
from benchmarks.stats import Distribution

FORMAT = 1
_NOTHING = "-"  # rows with only such cells are left out
_BUSY_SHARE = 0.1  # share of the cores above which to warn


def print_table(runs: Sequence[Run], console: Console) -> None:
    table = Table(title="Measured phase")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for title, show in _ROWS:
        cells = [show(run) for run in runs] if title else []
        if not title:
            table.add_section()
        elif any(cell != _NOTHING for cell in cells):
            table.add_row(title, *cells)
    console.print(table)
    for run in runs:
        for error, count in run.stats.errors.items():
            console.print(f"[red]{run.name}: {count} x {error}[/]", highlight=False)
    if len({run.result.prompts_digest for run in runs}) > 1:
        console.print("[red]The runs sent different prompts, because requests failed.[/]")
    cores = machine()["cores"]
    for run in runs:
        if run.other_cores is not None and run.other_cores > _BUSY_SHARE * cores:
            console.print(
                f"[yellow]{run.name}: other programs used {run.other_cores:.1f} of {cores} cores during the run; "
                "do not rely on its times.[/]"
            )
    if not torch.accelerator.is_available():
        console.print("No GPU: times are a CPU's, where video decoding competes with the model for the cores.")


def to_json(runs: Sequence[Run], workload: Workload, method: str, duration_s: float) -> dict[str, Any]:
    assert workload.tokens is not None
    return {
        "benchmark": "sharegpt",
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration_s": duration_s,
        "method": method,
        "machine": machine(),
        "versions": versions(),
        "dataset": {
            "path": str(workload.options.dataset),
            "kind": workload.dataset.kind,
            "conversations": len(workload.conversations),
            "requests": workload.num_requests,
            "max_input_tokens": workload.max_input_tokens,
            "token_ids": workload.tokens.description,
        },
        "server": dataclasses.asdict(workload.server) if workload.server else None,
        "config": workload.options.as_json(),
        "runs": [_run_json(run) for run in runs],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "description": run.description,
        **dataclasses.asdict(run.stats),
        **dataclasses.asdict(run.traffic),
        "same_answers_as_first_run": run.same_answers,
        "other_cores": run.other_cores,
        "prompts_digest": run.result.prompts_digest,
        "fill": run.fill,
        "records": [dataclasses.asdict(record) for record in run.result.records],
    }


def _ms(value: float | None) -> str:
    return _NOTHING if value is None else f"{value * 1e3:.1f}" if value < 0.1 else f"{value * 1e3:.0f}"


def _mb(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:.2f}"


def _ratio(wire_bytes: int | None, raw_bytes: int | None) -> str:
    return f"{raw_bytes / wire_bytes:.2f}" if wire_bytes and raw_bytes else _NOTHING


def _stored(run: Run, what: str) -> int | None:
    """Return the bytes that the fill wrote, including its warm-up; None if there was no fill."""
    stored: int | None = (run.fill or {}).get(f"{what}_bytes")
    return stored


def _stored_mb(run: Run, what: str) -> str:
    return _NOTHING if run.fill is None else _mb(_stored(run, what))


def _cores(run: Run) -> str:
    return _NOTHING if run.other_cores is None else f"{run.other_cores:.1f}"


def _share(run: Run) -> str:
    return f"{run.stats.cached_tokens.total / run.stats.prompt_tokens:.0%}" if run.stats.prompt_tokens else _NOTHING


def _times(title: str, pick: Callable[[Run], Distribution]) -> list[tuple[str, Callable[[Run], str]]]:
    return [
        ("", str),
        (f"{title}, p50", lambda run: _ms(pick(run).p50)),
        (f"{title}, p95", lambda run: _ms(pick(run).p95)),
        (f"{title}, p99", lambda run: _ms(pick(run).p99)),
        (f"{title}, mean", lambda run: _ms(pick(run).mean)),
    ]


# A row without a title is a line between sections.
_ROWS: list[tuple[str, Callable[[Run], str]]] = [
    ("requests", lambda run: str(run.stats.requests)),
    ("failures", lambda run: str(run.stats.failures)),
    ("answers as in the first run", lambda run: str(run.same_answers)),
    *_times("TTFT (ms)", lambda run: run.stats.ttft_s),
    *_times("TPOT (ms)", lambda run: run.stats.tpot_s),
    *_times("ITL (ms)", lambda run: run.stats.itl_s),
    *_times("whole request (ms)", lambda run: run.stats.e2e_s),
    ("", str),
    ("requests/s", lambda run: f"{run.stats.requests_per_s:.2f}"),
    ("output tokens/s", lambda run: f"{run.stats.output_tokens_per_s:.1f}"),
    ("", str),
    ("prompt tokens", lambda run: str(run.stats.prompt_tokens)),
    ("cached, from device", lambda run: str(run.stats.cached_tokens.device)),
    ("cached, from host", lambda run: str(run.stats.cached_tokens.host)),
    ("cached, from storage", lambda run: str(run.stats.cached_tokens.storage)),
    ("cached, of the prompt tokens", _share),
    ("", str),
    ("read, on the wire (MB)", lambda run: _mb(run.traffic.wire_bytes)),
    ("read, raw (MB)", lambda run: _mb(run.traffic.raw_bytes)),
    ("raw / wire", lambda run: _ratio(run.traffic.wire_bytes, run.traffic.raw_bytes)),
    ("", str),
    ("stored before, on the wire (MB)", lambda run: _stored_mb(run, "wire")),
    ("stored before, raw (MB)", lambda run: _stored_mb(run, "raw")),
    ("raw / wire", lambda run: _ratio(_stored(run, "wire"), _stored(run, "raw"))),
    ("", str),
    ("cores that others used", _cores),
]
