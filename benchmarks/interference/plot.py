"""Draws the timeline of a run as a PNG, with requests as rows and stages as colours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from matplotlib.patches import Patch

from benchmarks.report import figure
from sgl_kvfetch.timeline import Span, Stage

# Okabe and Ito's colours, which colour-blind readers can distinguish, for busy stages; greys for waiting.
_COLOURS: dict[Stage, str] = {
    "queued": "#666666",
    "parked": "#d9d9d9",
    "lookup": "#a6a6a6",
    "transmit": "#56B4E9",
    "decode": "#E69F00",
    "restore": "#009E73",
    "prefill": "#D55E00",
    "generate": "#CC79A7",
}
_LABELS: dict[Stage, str] = {"decode": "decode (video or bytes)", "generate": "generate (decode tokens)"}
# These stages overlap, so each has its own strip in the row.
_STRIPS: tuple[Stage, ...] = ("transmit", "decode", "restore")
_LONG_HEIGHT, _SHORT_HEIGHT, _GAP = 4.0, 1.0, 0.25
_ZOOM_SHARE = 0.12  # share of the run


def plot_timeline(path: Path, requests: Mapping[str, Sequence[Span]], long: Collection[str], subtitle: str) -> None:
    """Draw the whole run on the left, and the time around the end of the first fetch on the right. ``requests``: each
    one's spans, in the order of sending. ``long``: names of the requests that fetch."""
    zero_s = min(span.start_s for spans in requests.values() for span in spans)
    end_s = max(span.end_s for spans in requests.values() for span in spans) - zero_s
    landed_s = min((spans[-1].start_s for name, spans in requests.items() if name in long), default=zero_s) - zero_s
    zoom = (landed_s - 0.7 * _ZOOM_SHARE * end_s, landed_s + 0.3 * _ZOOM_SHARE * end_s)
    rows = sum(_height(name, long) + _GAP for name in requests)
    inside = {
        name: spans
        for name, spans in requests.items()
        if any(span.end_s - zero_s > zoom[0] and span.start_s - zero_s < zoom[1] for span in spans)
    }
    look: dict[str, Any] = {"figsize": (15, 1.8 + 0.13 * rows), "gridspec_kw": {"width_ratios": (3, 2)}, "dpi": 100}
    with figure(path, f"Requests over time. {subtitle}", columns=2, **look) as (drawn, ((whole, near),)):
        for axes, shown in ((whole, requests), (near, inside)):
            _draw_rows(axes, shown, long, zero_s)
            axes.set_xlabel("seconds")
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
        whole.set(title="The whole run", xlim=(0, end_s))
        whole.axvspan(*zoom, color="black", alpha=0.06, lw=0)
        near.set(title="Around the end of the first fetch", xlim=zoom)
        handles = [Patch(color=_COLOURS[stage]) for stage in get_args(Stage)]
        labels = [_LABELS.get(stage, stage) for stage in get_args(Stage)]
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)


def _draw_rows(axes: Any, requests: Mapping[str, Sequence[Span]], long: Collection[str], zero_s: float) -> None:
    top = 0.0
    ticks: list[tuple[float, str]] = []
    for name, spans in requests.items():
        height = _height(name, long)
        for span in spans:
            bar_top, bar_height = _place(span.stage, top, height)
            axes.broken_barh(
                [(span.start_s - zero_s, span.end_s - span.start_s)],
                (bar_top, bar_height),
                color=_COLOURS[span.stage],
                lw=0,
            )
        ticks.append((top + height / 2, name))
        top += height + _GAP
    axes.set_ylim(top, -_GAP)
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=7)
    for label in axes.get_yticklabels():
        if label.get_text() in long:
            label.set(fontsize=9, weight="bold")


def _height(name: str, long: Collection[str]) -> float:
    return _LONG_HEIGHT if name in long else _SHORT_HEIGHT


def _place(stage: Stage, top: float, height: float) -> tuple[float, float]:
    """Return a bar's top and height."""
    if stage not in _STRIPS:
        return top, height
    strip = height / (len(_STRIPS) + 1)
    return top + strip * (_STRIPS.index(stage) + 0.5), strip
