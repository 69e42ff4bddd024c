"""Reports the rows as a table, as JSON, and as a plot."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.codec.measure import Measured, Row
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.machine import machine, versions
from benchmarks.report import COLOURS, figure, make_table
from benchmarks.stats import Estimate

_COLUMNS = ("method", "bits per value", "ratio", "KL (nats)", "change of NLL", "same top token", "encode MB/s")
_TITLE = "All bytes counted; ± is a 95% confidence interval over the windows"
_LOSSLESS_KL = 1e-9
_SAMPLED = ("bits_per_value", "kl", "dnll", "top1")


def print_report(measured: Measured, console: Console) -> None:
    console.print(make_table(_TITLE, (*_COLUMNS, "decode MB/s"), map(_cells, measured.rows)))
    for name, reason in measured.left_out.items():
        console.print(f"{name} is left out: {reason}", style="yellow", markup=False)
    console.print(
        f"NLL after exact KV: {measured.nll.mean:.4f} nats per token. Speeds are those of this project's "
        "implementations on a CPU; the authors' run on GPUs."
    )


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.bits_per_value.show(".3f"),
        f"{row.ratio:.2f}",
        row.kl.show(".2e"),
        row.dnll.show("+.5f", ".5f"),
        row.top1.show(".2%"),
        f"{row.encode_mb_s:.1f}",
        f"{row.decode_mb_s:.1f}",
    ]


def make_report(measured: Measured, config: dict[str, Any], device: str, duration_s: float) -> dict[str, Any]:
    return {
        "benchmark": "codec",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration_s": duration_s,
        **{key: config[key] for key in ("model", "text", "part", "windows")},
        "context_tokens": config["context"],
        "continuation_tokens": config["continuation"],
        "kv": {
            "layers": measured.shape.num_layers,
            "heads": measured.shape.num_heads,
            "k_head_dim": measured.shape.k_head_dim,
            "v_head_dim": measured.shape.v_head_dim,
            "dtype": "bfloat16",
            "page_size": PAGE_TOKENS,
        },
        "model_dtype": "float32",
        "nll": measured.nll.mean,
        "machine": machine() | {"device": device, "torch_threads": torch.get_num_threads()},
        "versions": versions(),
        "config": config,
        "left_out": measured.left_out,
        "rows": [_row_json(row) for row in measured.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    """Return the row as JSON. ``..._ci`` is ``[low, high]``, or null for a single window. ``samples``: its windows."""
    shown = {name: value for name, value in vars(row).items() if not isinstance(value, Estimate)}
    shown["samples"] = [{name: getattr(sample, name) for name in _SAMPLED} for sample in row.samples]
    for name, value in vars(row).items():
        if isinstance(value, Estimate):
            shown |= {name: value.mean, f"{name.removesuffix('_per_value')}_ci": value.interval}
    return shown


def plot_rates(path: Path, rows: Sequence[Row], subtitle: str) -> None:
    """Plot KL against bits, one curve per family; lower left is better. Whiskers are 95% confidence intervals. Lossless
    methods, with a KL of 0, are vertical lines."""
    looks = zip(cycle(COLOURS[1:]), cycle("sD^vPX<>p"), cycle(("-", "--", ":")), strict=False)
    our_looks = zip(cycle(COLOURS[:1]), cycle("ov"), cycle(("-", "--")), strict=False)
    with figure(path, f"KV cache: accuracy against size\n{subtitle}", figsize=(9.5, 6)) as (_, ((axes,),)):
        for family in dict.fromkeys(row.family for row in rows):
            curve = [row for row in rows if row.family == family and row.kl.mean > _LOSSLESS_KL]
            if not curve:
                continue
            curve.sort(key=lambda row: row.bits_per_value.mean)
            is_ours = "(ours)" in family
            colour, marker, style = next(our_looks if is_ours else looks)
            kls = [row.kl.mean for row in curve]
            margins = [row.kl.margin or 0.0 for row in curve]
            # A logarithmic axis cannot show an interval that reaches below zero: cut it at a tenth of the mean.
            below = [min(margin, 0.9 * kl) for margin, kl in zip(margins, kls, strict=True)]
            axes.errorbar(
                [row.bits_per_value.mean for row in curve],
                kls,
                yerr=[below, margins],
                fmt=f"{marker}{style}",
                color=colour,
                lw=2.4 if is_ours else 1.3,
                elinewidth=0.8,
                label=family,
            )
        for row in rows:
            if row.kl.mean <= _LOSSLESS_KL:
                axes.axvline(row.bits_per_value.mean, color="#444444", ls=":", label=f"{row.name}, no loss")
        axes.set(yscale="log", xlabel="bits per value, everything counted", ylabel="KL to exact KV (nats per token)")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
