"""``kvfetch doctor``: check what this machine can do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from sgl_kvfetch.cli import gpu_checks, software_checks
from sgl_kvfetch.cli.checks import Check, Status, run_check
from sgl_kvfetch.cli.options import JsonOption, TokenFileOption, TokenOption, make_console, read_token

_STYLES: dict[Status, str] = {"yes": "green", "no": "bold red", "warn": "yellow"}


def doctor(
    store: Annotated[str | None, typer.Option(metavar="URL", help="Also check this store.", show_default=False)] = None,
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
    checks = list(_run_checks(store, read_token(token, token_file)))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    if any(check.status == "no" for check in checks):
        raise typer.Exit(1)


def _run_checks(store: str | None, token: str | None) -> Iterator[Check]:
    checks: list[tuple[str, Callable[[], list[Check]]]] = [
        ("Python", software_checks.check_python),
        ("SGLang", software_checks.check_sglang),
        ("CUDA GPU", gpu_checks.check_gpu),
        ("Triton", software_checks.check_triton),
        ("codecs", software_checks.check_codecs),
    ]
    for name, check in checks:
        yield from run_check(name, check)
    if store is not None:
        yield from run_check("store", lambda: _check_store(store, token))


def _check_store(url: str, token: str | None) -> list[Check]:
    from sgl_kvfetch.cli.store_checks import check_store

    return check_store(url, token)


def _print(checks: Sequence[Check]) -> None:
    from rich.text import Text

    from sgl_kvfetch.cli.tables import make_table

    table = make_table(("check", "", "found", "what to do"))
    for check in checks:
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), check.found, check.advice)
    console = make_console()
    console.print(table)
    missing = sum(check.status == "no" for check in checks)
    console.print(f"host mode cannot run here: {missing} to fix" if missing else "host mode can run here")
