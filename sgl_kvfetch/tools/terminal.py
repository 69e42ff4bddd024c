"""Defines the options and arguments that commands share, prints their results, and names a package that a command
lacks.

Without extras, only what ``kvfetch serve`` needs is installed. Commands import the rest where they work with it, and
`ModuleNotFoundError` is translated once, for all commands, in ``app.py``.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import printable
from sgl_kvfetch.user_files import TOKEN_ENV, environment_secret, format_size as format_size, read_token_file

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from sgl_kvfetch.stores import TlsFiles

_PROJECT = "sgl_kvfetch"
_CERT_ENV, _KEY_ENV = "KVFETCH_TLS_CLIENT_CERT", "KVFETCH_TLS_CLIENT_KEY"


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the name of the package that is not installed. Raise ``error`` again if the module is one of ours."""
    package = (error.name or _PROJECT).partition(".")[0]
    if package == _PROJECT:
        raise error
    return package


def needs_package(what: str, error: ModuleNotFoundError) -> ConfigError:
    """Return the error of ``what``, which cannot run without the package that ``error`` names."""
    package = missing_package(error)
    return ConfigError(
        f"{what} needs {package}, which is not installed here: {how_to_install(package)}, or run it on a machine "
        "that has SGLang"
    )


def how_to_install(package: str) -> str:
    """Return the command that installs a package: by this project's extra that has it, if one has. This project is not
    on PyPI, where anybody could take its name."""
    return f"{sys.executable} -m pip install {_wanted_by(package)}"


def _wanted_by(distribution: str) -> str:
    """Return what pip is to install for the sake of a distribution, and where."""
    for line in importlib.metadata.requires(_PROJECT) or []:
        name, _, marker = line.partition(";")
        if re.split(r"[^\w.-]", name)[0] == distribution:
            extra = re.search(r"extra == [\"'](\w+)[\"']", marker)
            return f"'.[{extra[1]}]' in a checkout" if extra else ". in a checkout"
    return distribution


_MAX_FAILURES_SHOWN = 20


def option(metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    """Return an option for `Annotated`. ``text`` is its help; flags and choices have no ``metavar``."""
    return typer.Option(*names, metavar=metavar, help=text, **settings)


def json_flag(*shapes: Any) -> Any:
    """Return the flag ``--json`` of a command that prints one of ``shapes``: a record's type, a list of one, or a
    text."""
    return option(None, f"Print JSON, for programs: {'; or '.join(map(_shape_text, shapes))}.", "--json")


def _shape_text(shape: Any) -> str:
    if isinstance(shape, str):
        return shape
    if isinstance(shape, type):
        return f"an object with {_fields_of(shape)}"
    return f"a list, each with {_fields_of(*get_args(shape))}"


def _fields_of(record: type, with_inner: bool = True) -> str:
    """Return the names of a record's fields, and of the fields of records in them."""
    names = []
    for name, hint in get_type_hints(record).items():
        inner = next((kind for kind in (hint, *get_args(hint)) if _is_record(kind)), None)
        every = "each with" if get_origin(hint) in (list, tuple, dict) else "with"
        names.append(f"{name} ({every} {_fields_of(inner, False)})" if inner and with_inner else name)
    return ", ".join(names)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))


STORE_HELP = "http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory."
PART_HELP = (
    f"A store, or a part of it. A store is {STORE_HELP} STORE#PREFIX is a part, where PREFIX is the start of object "
    "names, such as a namespace that kvfetch inspect shows."
)
MODEL_HELP = (
    "its name or model_id, as kvfetch inspect shows it; a fingerprint, a namespace; or the start of one of these, "
    "if no model has exactly this name."
)
INDEX_HELP = (
    "redis://HOST:PORT/DB, rediss://... or redis+cluster://... Other users of this machine can see it: a password "
    "belongs into the environment, as KVFETCH_INDEX_PASSWORD."
)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help=STORE_HELP)]
PartArgument = Annotated[str, typer.Argument(metavar="STORE", help=PART_HELP)]
IndexOption = Annotated[str | None, option("URL", f"The index of an S3 store: {INDEX_HELP}")]
YesOption = Annotated[bool, option(None, "Do not ask.", "--yes", "-y")]
DryRunOption = Annotated[bool, option(None, "Show what would be deleted or written, and change nothing.", "--dry-run")]


KeyFileOption = Annotated[Path | None, option("FILE", "The keys that this store's segments are encrypted with.")]


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    """How a command reaches a store. A command's parameter of this type is all of these options."""

    token_file: Annotated[
        Path | None, option("FILE", f"A file that holds the token; without it, {TOKEN_ENV} in the environment does.")
    ] = None

    @cached_property
    def secret(self) -> str | None:
        """The token, or None. Raises ConfigError."""
        if self.token_file is not None:
            return read_token_file(self.token_file, "--token-file")
        return environment_secret(TOKEN_ENV)

    @property
    def certificate(self) -> TlsFiles | None:
        """What a store is shown that demands a certificate. Raises ConfigError for a key alone."""
        from sgl_kvfetch.stores import TlsFiles

        cert, key = client_certificate()
        return None if cert is None else TlsFiles(cert=cert, key=key)

    @property
    def token_source(self) -> str | None:
        """What messages call the place that the token comes from; None if there is no token."""
        if self.token_file is not None:
            return f"--token-file {self.token_file}"
        return f"{TOKEN_ENV} in the environment" if environment_secret(TOKEN_ENV) else None


@dataclass(frozen=True, kw_only=True)
class IndexedAccess(StoreAccess):
    """The same, also of an S3 store with an index."""

    index: IndexOption = None


def client_certificate() -> tuple[str | None, str | None]:
    """Return the files of our own certificate and of its key that the environment names. The key is None if it is in
    the same file. Raises ConfigError for a key alone."""
    cert, key = (os.environ.get(name) or None for name in (_CERT_ENV, _KEY_ENV))
    if cert is None and key is not None:
        raise ConfigError(f"{_KEY_ENV}={key} needs {_CERT_ENV}, the certificate that it belongs to")
    return cert, key


def say(text: str, *, before: str = "", err: bool = False) -> None:
    """Print lines for people, behind what we have styled ourselves. All that commands print goes through here, or
    through `make_console`: names and errors come from others, and must not control the terminal."""
    typer.echo(before + _printable_lines(text), err=err)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def ask_to_delete(err: bool) -> None:
    """Ask whether to go on, and end the command unless the answer is yes. ``err``: ask on stderr. Raises ConfigError if
    nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: add --yes to delete them")
    typer.confirm("Delete them?", abort=True, err=err)


def kept_line(num_bytes: int) -> str:
    """Return what a command says if the bucket keeps ``num_bytes`` that it has deleted."""
    return (
        f"WARNING: the bucket has versions: it keeps all {format_size(num_bytes)} of what was deleted, until a "
        "lifecycle rule with NoncurrentVersionExpiration removes them"
    )


def show(
    value: object, as_json: bool, lines: Iterable[Table | str], failures: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Print ``value`` as JSON, or else the first failures and ``lines``. If there are failures, exit with 1.

    ``failures``: errors by the object's name. Long lines are not wrapped, so that users can copy names.
    """
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        # JSON has no escape for what lies beyond ASCII, such as marks that turn the direction of text.
        typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
    else:
        for name, error in list(failures.items())[:_MAX_FAILURES_SHOWN]:
            say(f"FAILED {name}: {error}")
        if len(failures) > _MAX_FAILURES_SHOWN:
            say(f"FAILED and {len(failures) - _MAX_FAILURES_SHOWN} more, which --json names")
        console = make_console()
        for line in lines:
            if isinstance(line, str):
                say(line)
            else:
                console.print(line)
    if failures:
        raise typer.Exit(1)


class _Formatter(logging.Formatter):
    """Begins messages with our name. What SGLang's servers log as well has it already."""

    def format(self, record: logging.LogRecord) -> str:
        return _printable_lines(f"kvfetch: {super().format(record).removeprefix('kvfetch: ')}")


class _TimedFormatter(_Formatter):
    """Puts the time, with its offset from UTC, and the level before that."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")
        return f"{at} {record.levelname} {super().format(record)}"


def show_log(level: int, handler: logging.Handler, *, with_time: bool = False) -> None:
    """Let ``handler`` show what is logged from ``level`` on, and nothing else show it. ``with_time``: begin lines with
    time and level, as a command that runs for days should."""
    handler.setFormatter(_TimedFormatter() if with_time else _Formatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:  # rich would exit with 1
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Render text without control characters: what is printed, and the cells of tables."""
        return super().render_str(_printable_lines(text), **options)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without markup. If the output is not a terminal, lines are 200 columns wide, for long names."""
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    shown = (TextColumn(what), BarColumn(), *(columns or (MofNCompleteColumn(),)), TimeRemainingColumn())
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


def format_age(seconds: float) -> str:
    """Format a time span in its largest unit that fits twice."""
    for unit, size_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
