"""What the reports of all benchmarks share: the command line's form, tables, plots and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.machine import machine, versions
from sgl_kvfetch.errors import KVFetchError

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999", "#F0E442")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and the description as it is written."""


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``python -m MODULE``. ``description``: the module's docstring."""
    return argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=_HelpFormatter)


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole_numbers(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",") if part]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def output_file(text: str) -> Path:
    """Return the path of a file that can be written. This fails before the run, rather than after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing directory")
    return path


@contextmanager
def no_traceback() -> Iterator[None]:
    """End the process with a message for what a user can mend: a missing file, a wrong option."""
    try:
        yield
    except KVFetchError as e:
        raise SystemExit(f"error: {e}") from e


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column names its rows."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=not table.columns)
    for row in rows:
        table.add_row(*row)
    return table


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return a command line as JSON."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write figures, with the machine and the versions that they are of."""
    about = {"machine": machine(), "versions": versions()}
    path.write_text(json.dumps(content | about, indent=1) + "\n", encoding="utf-8")


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles, each between the two nearest values; None if nothing was measured."""
    names = ("mean", "p50", "p95", "p99")
    if not values:
        return dict.fromkeys(names)
    return dict(zip(names, [float(np.mean(values)), *np.percentile(values, (50, 95, 99)).tolist()], strict=True))


@contextmanager
def figure(path: Path, title: str, rows: int = 1, columns: int = 1, **look: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, ``(rows, columns)``, and write it as a PNG. ``look`` goes to ``subplots``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(rows, columns, layout="constrained", squeeze=False, **{"dpi": 150, **look})
    drawn.suptitle(title, fontsize=10)
    try:
        yield drawn, axes
        drawn.savefig(path, format="png")
    finally:
        pyplot.close(drawn)
