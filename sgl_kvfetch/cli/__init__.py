"""The command ``kvfetch``.

What needs torch, SGLang or a server is imported by the command that needs it: ``kvfetch --help`` is quick, and
``kvfetch doctor`` can report that one of them does not import.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sgl_kvfetch import __version__
from sgl_kvfetch.cli.calibrate import calibrate
from sgl_kvfetch.cli.doctor import doctor
from sgl_kvfetch.cli.encode import encode
from sgl_kvfetch.cli.inspect import inspect
from sgl_kvfetch.cli.profile import profile
from sgl_kvfetch.cli.serve import serve
from sgl_kvfetch.cli.verify import verify
from sgl_kvfetch.errors import KVFetchError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    """Turns domain errors into one line and an exit code of their own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVFetchError as e:
            typer.echo(f"kvfetch: {e}", err=True)
            raise typer.Exit(EXIT_ERROR) from e
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output left (``| head``). The interpreter would complain when it flushes.
            with contextlib.suppress(OSError):
                sys.stdout.close()
            raise typer.Exit(EXIT_ERROR) from None


app = typer.Typer(
    name="kvfetch",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # theirs show local variables, and tokens are among ours
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(inspect)
app.command()(verify)
app.command()(encode)
app.command()(calibrate)
app.command()(profile)
app.command()(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfetch {__version__}")
        raise typer.Exit()


@app.callback()
def _kvfetch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV caches of SGLang on remote storage, as losslessly coded video."""


def main() -> None:
    """The entry point."""
    app()
