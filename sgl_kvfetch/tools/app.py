"""The command ``kvfetch``.

A command's module is imported only when the command runs, and imports torch and codecs only where it works with them.
``kvfetch COMMAND --help`` is therefore quick, and ``kvfetch doctor`` can report that torch or SGLang does not import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from sgl_kvfetch import __version__
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.log import printable
from sgl_kvfetch.processes import let_threads_sleep, run_and_end
from sgl_kvfetch.tools.terminal import needs_package, say

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Each text is also the first line of the command's own help.
COMMANDS = {
    "serve": "Serve a directory as a store, until Ctrl-C or SIGTERM.",
    "estimate": "Estimate whether fetching is faster than prefill, and how large a store would be.",
    "bench": "Measure the time to first token on a running server: of prompts that it prefills, and of the same ones "
    "fetched.",
    "compare": "Ask a running server twice for the same answers, from its caches and recomputed, and compare the "
    "probabilities.",
    "inspect": "Show what is stored, by namespace or by segment, and how it compares with raw KV.",
    "why": "Explain why a prompt, or a request, was not served from a store, and what to do about it.",
    "verify": "Read and decode everything that is stored, and compare it with its checksums.",
    "encode": "Encode segments that servers wrote with a fast codec as video, at one or more resolutions.",
    "reindex": "Rebuild the page index of an S3 store.",
    "gc": "Delete expired segments of an S3 store or a directory, and the least recently used until the rest fits.",
    "clear": "Delete all segments of a store, or of a part of it.",
    "pin": "Evict prompts' segments last, list such pins, or remove them.",
    "calibrate": "Measure how a model's keys and values vary and how much errors in them matter.",
    "profile": "List, show, read, publish or withdraw the profiles of a store.",
    "doctor": 'Check a store and what this machine can do, and show how to fix each "no".',
}
_MODULES = {  # of the commands that have no module of their own
    "pin": "prompts",
    **dict.fromkeys(("gc", "reindex"), "upkeep"),
    "profile": "profiles",
}
_LOOK: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,  # Typer's tracebacks show local variables, which may hold tokens
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "add_completion": False,
}


def import_command(name: str) -> Callable[..., None]:
    """Return the function that runs a command."""
    function: Callable[..., None] = getattr(
        importlib.import_module(f"sgl_kvfetch.tools.{_MODULES.get(name, name)}"), name
    )
    return _with_groups(function)


def _with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its groups: parameters whose type is a dataclass. They come behind its own options,
    in front of ``--json``."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    if not groups:
        return function

    @functools.wraps(function)
    def run(**options: Any) -> None:
        made = {
            name: group(**{each.name: options.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        function(**options, **made)

    def parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    own = [
        parameter(name, each.default, hints[name])
        for name, each in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    grouped = []
    for group in groups.values():
        of_group = get_type_hints(group, include_extras=True)
        grouped += [parameter(each.name, each.default, of_group[each.name]) for each in fields(group)]
    parameters = sorted([*own, *grouped], key=lambda each: each.name == "as_json")
    new: Any = run
    new.__signature__ = inspect.Signature(parameters)
    new.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _without_types(params: list[Any]) -> list[Any]:
    """Let the help of flags show no type: they take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Commands(TyperGroup):
    """Imports the command that runs. Reports domain errors and missing packages as one line and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=text, rich_markup_mode="markdown") for name, text in COMMANDS.items()
        }

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        command = typer.Typer(**_LOOK)
        command.command(name, cls=_Command)(import_command(name))
        return name, typer.main.get_command(command), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVFetchError as e:
            say(printable(f"kvfetch: {'; '.join((str(e), *getattr(e, '__notes__', ())))}"), err=True)
            raise typer.Exit(EXIT_ERROR) from e
        except ModuleNotFoundError as e:
            say(f"kvfetch: {needs_package(ctx.invoked_subcommand, e)}", err=True)
            raise typer.Exit(EXIT_ERROR) from e
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has exited (``| head``). Close stdout, or the interpreter's last flush fails.
            with contextlib.suppress(OSError):
                sys.stdout.close()
            raise typer.Exit(EXIT_ERROR) from None


app = typer.Typer(name="kvfetch", cls=_Commands, no_args_is_help=True, **_LOOK)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"kvfetch {__version__}")
        raise typer.Exit()


@app.callback()
def _kvfetch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV caches of SGLang on a store in your network, at two thirds of their size or a tenth."""


def _run() -> None:
    """Run the command. Python's own exit code for an exception, 1, would say that the command has found something."""
    try:
        app(prog_name="kvfetch")
    except OSError as e:  # the disk that takes our output is full, for example
        say(f"kvfetch: {e}", err=True)
        sys.exit(EXIT_ERROR)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_ERROR)


def main() -> None:
    """Run the ``kvfetch`` command."""
    let_threads_sleep()
    run_and_end(_run)
