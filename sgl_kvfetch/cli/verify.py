"""``kvfetch verify``: reads everything, reports what is corrupt."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from sgl_kvfetch.cli.options import TARGET_HELP, JsonOption, TokenFileOption, TokenOption, read_token


def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    jobs: Annotated[
        int, typer.Option(min=1, max=256, help="Segments that are read, and threads that decode.", show_default="cores")
    ] = os.cpu_count() or 1,
) -> None:
    """Read and decode everything that is stored, and compare it with its checksums.

    Exit code 0 if all is well, 1 if something is corrupt or missing, 2 if the store cannot be read. Nothing is
    changed. What a crashed writer left (data without a manifest) is counted, and is no fault: nobody can find it.

    Examples:

        kvfetch verify http://127.0.0.1:8700

        kvfetch verify file:///var/cache/kv#4f0c

        kvfetch verify backup/8-91ab.kvm
    """
    from sgl_kvfetch.cli import verifying

    if not asyncio.run(verifying.run(target, read_token(token, token_file), as_json, jobs)):
        raise typer.Exit(1)
