"""Prints results as text, tables or JSON, and reads and writes sizes and ages as users do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.sizes import UNITS

_AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def show(value: object, as_json: bool, lines: Iterable[Table | str]) -> None:
    """Print ``value`` as JSON, or else ``lines``. Long lines are not wrapped, so that users can copy names."""
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
        return
    console = make_console()
    for line in lines:
        if isinstance(line, str):
            typer.echo(line)
        else:
            console.print(line)


def failed_lines(failures: Mapping[str, str], most: int | None = None) -> Iterator[str]:
    """Yield a line for each of the first ``most`` failures. ``failures``: errors by the object's name."""
    for name, error in list(failures.items())[:most]:
        yield f"FAILED {name}: {printable(error)}"
    if most is not None and len(failures) > most:
        yield f"FAILED and {len(failures) - most} more"


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without markup. If the output is not a terminal, lines are 200 columns wide, for long names."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table: columns of text, of which the first never wraps, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def make_progress(what: str, *columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr, which shows nothing unless that is a terminal. ``columns`` replace the count."""
    console = make_console(stderr=True)
    shown = (TextColumn(what), BarColumn(), *(columns or (MofNCompleteColumn(),)), TimeRemainingColumn())
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


def format_size(num_bytes: int) -> str:
    """Format a size with three significant digits, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def format_age(seconds: float) -> str:
    """Format a time span in its largest unit that fits twice."""
    for unit, size_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def parse_age(text: str) -> float:
    """Return an age in seconds. Units are s, m (minutes), h and d. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"invalid age {text!r}; expected a form such as 90s, 45m, 12h or 30d")
    return float(match[1]) * _AGE_UNITS_S[match[2]]


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def printable(text: str) -> str:
    """Replace unprintable characters: stored text may hold anything, such as terminal escapes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
