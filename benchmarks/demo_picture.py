"""Draws the demo's picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import COLOURS, figure


def draw(path: Path, times_s: Mapping[str, float], wire_bytes: Mapping[str, int], title: str) -> None:
    """Draw the times to first token, and beside them the bytes on the wire. Ways keep their colours."""
    colours = dict(zip(times_s, COLOURS, strict=False))
    with figure(path, title, columns=2, figsize=(11, 3)) as (_, (panels,)):
        _bars(panels[0], times_s, colours, "%.2f s", "time to first token (s)")
        megabytes = {name: number / 1e6 for name, number in wire_bytes.items()}
        _bars(panels[1], megabytes, colours, "%.1f MB", "bytes on the wire (MB)")


def _bars(axes: Any, values: Mapping[str, float], colours: Mapping[str, str], form: str, label: str) -> None:
    bars = axes.barh(list(values), list(values.values()), color=[colours[name] for name in values])
    axes.bar_label(bars, fmt=form, padding=4)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(xlabel=label)
    axes.spines[["top", "right"]].set_visible(False)
