"""Reports the rows as a table and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.codec.measure import Measured, Row
from benchmarks.codec.options import Options
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.codec.statistics import Estimate
from benchmarks.machine import machine, versions

FORMAT = 1
_TITLES = ("bits a value", "ratio", "KL (nats)", "change of NLL", "same top token", "encode MB/s", "decode MB/s")


def print_methods(methods: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table("method", "source")
    for name, source in methods:
        table.add_row(name, source)
    console.print(table)


def print_table(measured: Measured, console: Console) -> None:
    table = Table(title="All bytes counted; ± is a 95% confidence interval over the windows")
    table.add_column("method", no_wrap=True)
    for title in _TITLES:
        table.add_column(title, justify="right")
    family = ""
    for row in measured.rows:
        if family and row.family != family:
            table.add_section()
        family = row.family
        table.add_row(*_cells(row))
    console.print(table)
    _print_shares(measured.rows, console)
    for name, reason in measured.left_out.items():
        console.print(f"{name} is left out: {reason}", style="yellow", markup=False)
    console.print(
        f"NLL after exact KV: {measured.nll.mean:.4f} nats a token. Speeds are those of this project's implementations "
        "on a CPU; the authors' run on GPUs."
    )


def _print_shares(rows: Sequence[Row], console: Console) -> None:
    table = Table("method", "shares of its bytes")
    for row in rows:
        if row.shares:
            table.add_row(row.name, ", ".join(f"{name} {share:.1%}" for name, share in row.shares.items()))
    if table.row_count:
        console.print(table)


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.bits_per_value.show(".3f"),
        f"{row.ratio:.2f}",
        row.kl.show(".2e"),
        row.dnll.show("+.5f", ".5f"),
        Estimate(row.top1.mean * 100, row.top1.margin and row.top1.margin * 100).show(".2f") + "%",
        f"{row.encode_mb_s:.1f}",
        f"{row.decode_mb_s:.1f}",
    ]


def to_json(measured: Measured, options: Options, device: str, duration_s: float) -> dict[str, Any]:
    shape = measured.shape
    return {
        "benchmark": "codec",
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration_s": duration_s,
        "model": options.model,
        "text": str(options.text),
        "part": options.part,
        "windows": options.windows,
        "context_tokens": options.context_tokens,
        "continuation_tokens": options.continuation_tokens,
        "kv": {
            "layers": shape.num_layers,
            "heads": shape.num_heads,
            "k_head_dim": shape.k_head_dim,
            "v_head_dim": shape.v_head_dim,
            "dtype": "bfloat16",
            "page_size": PAGE_TOKENS,
        },
        "model_dtype": "float32",
        "nll": measured.nll.mean,
        "machine": machine() | {"device": device, "torch_threads": torch.get_num_threads()},
        "versions": versions(),
        "config": options.as_json(),
        "left_out": measured.left_out,
        "rows": [_row_json(row) for row in measured.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    """Return the row as JSON. ``..._ci`` is ``[low, high]``, or null for a single window."""
    return {
        "name": row.name,
        "source": row.source,
        "family": row.family,
        "bits_per_value": row.bits_per_value.mean,
        "bits_ci": row.bits_per_value.interval,
        "ratio": row.ratio,
        "kl": row.kl.mean,
        "kl_ci": row.kl.interval,
        "dnll": row.dnll.mean,
        "dnll_ci": row.dnll.interval,
        "top1": row.top1.mean,
        "top1_ci": row.top1.interval,
        "encode_mb_s": row.encode_mb_s,
        "decode_mb_s": row.decode_mb_s,
        "shares": row.shares,
    }
