"""``kvfetch timeline``: convert a timeline to a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.timeline import Span, Stage, read_spans
from sgl_kvfetch.tools.terminal import option


def timeline(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What KVFETCH_TIMELINE named: FILE.0, FILE.0.data, ...")
    ],
    perfetto: Annotated[Path, option("OUT", "The trace to write.", show_default=False)],
) -> None:
    """Convert timelines of device mode to one trace, for ui.perfetto.dev or chrome://tracing.

    Each request is a process of the trace, with a row for each of its stages. The trace begins with the first span.

    Example:

        kvfetch timeline timeline.0 timeline.0.data --perfetto trace.json
    """
    spans = sorted((span for file in files for span in _read(file)), key=lambda span: span.start_s)
    if not spans:
        raise ConfigError(f"{', '.join(map(str, files))}: no spans, so there is nothing to show")
    try:
        perfetto.write_bytes(msgspec.json.encode({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}))
    except OSError as e:
        raise ConfigError(f"{perfetto}: {e.strerror}") from e
    typer.echo(f"{perfetto}: {len(spans)} spans")


def _read(file: Path) -> list[Span]:
    """Read a timeline. Raises ConfigError and FormatError."""
    try:
        return read_spans(file)
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from e


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return the events of a trace in Chrome's Trace Event Format, with times in microseconds since the first span.

    ``spans`` are sorted by their start. Spans of a thread must not overlap, so a stage has as many threads as it has
    spans at a time.
    """
    events: list[dict[str, object]] = []
    processes: dict[str, int] = {}
    ends: dict[tuple[int, Stage], list[float]] = {}  # of the last span of each thread of a stage
    threads: dict[tuple[int, Stage, int], int] = {}
    for span in spans:
        if span.request not in processes:
            processes[span.request] = len(processes) + 1
            events.append(_name("process_name", processes[span.request], 0, span.request))
        process = processes[span.request]
        lanes = ends.setdefault((process, span.stage), [])
        lane = next((lane for lane, end_s in enumerate(lanes) if end_s <= span.start_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        if (row := (process, span.stage, lane)) not in threads:
            threads[row] = len(threads) + 1
            events.append(_name("thread_name", process, threads[row], span.stage))
        times = {"ts": 1e6 * (span.start_s - spans[0].start_s), "dur": 1e6 * (span.end_s - span.start_s)}
        events.append({"ph": "X", "name": span.stage, "pid": process, "tid": threads[row], **times})
    return events


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
