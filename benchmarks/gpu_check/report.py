"""Reports the findings as JSON and as a Markdown page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.runner import Result


def write(results: Sequence[Result], folder: Path, gpu: str | None) -> list[Path]:
    """Write two files that are named after the GPU, and replace that GPU's earlier files. Return their paths."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    stem = re.sub(r"[^a-z0-9]+", "-", (gpu or "no GPU").lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_page = folder / f"{stem}.json", folder / f"{stem}.md"
    content = {"date": date, "command": "scripts/gpu_check", "gpu": gpu, "steps": [asdict(r) for r in results]}
    as_json.write_text(json.dumps(content, indent=1) + "\n")
    as_page.write_text(page(results, gpu, date))
    return [as_json, as_page]


def page(results: Sequence[Result], gpu: str | None, date: str) -> str:
    lines = [f"# {gpu or 'No GPU'}", "", f"`scripts/gpu_check`, {date}.", ""]
    lines += table([{"step": r.title, "outcome": r.outcome, "s": r.seconds, "why": r.reason} for r in results])
    for result in results:
        lines += [""] + [f"* {result.name}: {note}" for note in result.notes] if result.notes else []
        for name in dict.fromkeys(row["table"] for row in result.rows):
            rows = [{k: v for k, v in row.items() if k != "table"} for row in result.rows if row["table"] == name]
            lines += ["", f"## {name}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    body = ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def summary(results: Sequence[Result]) -> str:
    """Return the results as text for the terminal."""
    lines = []
    for r in results:
        lines.append(f"{r.outcome:7}  {r.name:12} {r.seconds:6.1f} s  {r.reason}".rstrip())
        lines += [f"         {r.name}: {note}" for note in r.notes]
        lines += [f"         | {line}" for line in r.log_tail.splitlines()]
    return "\n".join(lines)
