"""``kvfetch doctor``: check what this machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from sgl_kvfetch.tools import checks
from sgl_kvfetch.tools.checks import Check, Status, run_check
from sgl_kvfetch.tools.options import JsonOption, TokenFileOption, TokenOption, make_console, print_json, read_token

_STYLES: dict[Status, str] = {"yes": "green", "no": "bold red", "warn": "yellow"}


def doctor(
    store: Annotated[str | None, typer.Option(metavar="URL", help="Also check this store.")] = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check what this machine can do, and say how to fix each "no".

    The exit code is 0 if this machine has everything that host mode needs (--enable-hierarchical-cache
    --hicache-storage-backend kvfetch), and 1 if not. Host mode also runs without the things marked "warn".

    Examples:

        kvfetch doctor

        kvfetch doctor --store http://cache:8700 --token-file token
    """
    found = list(_run_checks(store, read_token(token, token_file)))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if any(check.status == "no" for check in found):
        raise typer.Exit(1)


def _run_checks(store: str | None, token: str | None) -> Iterator[Check]:
    yield from run_check("Python", checks.check_python)
    yield from run_check("SGLang", checks.check_sglang)
    yield from run_check("CUDA GPU", checks.check_gpu)
    yield from run_check("Triton", checks.check_triton)
    yield from run_check("codecs", checks.check_codecs)
    if store is not None:
        yield from run_check("store", lambda: checks.check_store(store, token))


def _print(found: Sequence[Check]) -> None:
    from rich.text import Text

    from sgl_kvfetch.tools.tables import make_table

    table = make_table(("check", "", "found", "what to do"))
    for check in found:
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), check.found, check.advice)
    console = make_console()
    console.print(table)
    missing = sum(check.status == "no" for check in found)
    console.print(f"host mode cannot run here: {missing} to fix" if missing else "host mode can run here")
