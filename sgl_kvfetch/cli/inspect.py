"""``kvfetch inspect``: what a store, a segment or a file holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sgl_kvfetch.cli.options import TARGET_HELP, JsonOption, TokenFileOption, TokenOption, read_token


def inspect(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(min=1, help="Namespaces or segments to show.")] = 20,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Write the frames of one segment there, as pictures, with a contact sheet.",
            show_default=False,
        ),
    ] = None,
    span: Annotated[int, typer.Option(min=0, help="With --png: which span of the segment.")] = 0,
    max_frames: Annotated[int, typer.Option(min=1, help="With --png: frames to write of each chunk.")] = 4,
) -> None:
    """Show what is stored: by namespace, by segment, or chunk by chunk, and how it compares with raw KV.

    A store is shown by namespace, a namespace by segment, and a single segment in full. Sizes include scales and
    manifests. Overlapping segments of a namespace are each counted.

    Examples:

        kvfetch inspect http://127.0.0.1:8700

        kvfetch inspect http://127.0.0.1:8700#4f0c

        kvfetch inspect file:///var/cache/kv#4f0c...e1/8-91ab --png pictures
    """
    from sgl_kvfetch.cli import inspection

    request = inspection.Request(as_json, limit, png, span, max_frames)
    asyncio.run(inspection.run(target, read_token(token, token_file), request))
