"""``kvfetch clear``: delete what a store holds."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from sgl_kvfetch.cli.options import IndexOption, TokenFileOption, TokenOption, read_token
from sgl_kvfetch.cli.target import open_indexed_store
from sgl_kvfetch.cli.units import format_size
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.listing import list_segments

STORE_HELP = (
    "A store (http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory), or a part of it: "
    "STORE#PREFIX, where PREFIX is the start of object names, such as a namespace that kvfetch inspect shows."
)


def clear(
    store: Annotated[str, typer.Argument(metavar="STORE", help=STORE_HELP)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Delete all segments of a store, or of a part of it.

    What is deleted is computed again when it is needed; servers may use the store meanwhile. Pinned segments go, too;
    the pins stay, for what is stored later. A token needs the role `admin`, or, for a part within one namespace,
    `write`. To keep what is used most, use `kvfetch gc`.

    Examples:

        kvfetch clear http://127.0.0.1:8700

        kvfetch clear s3://kv-cache/llama#4f0c --index redis://10.0.0.5:6379/0 --yes
    """
    asyncio.run(_run(store, read_token(token, token_file), index, yes))


async def _run(text: str, token: str | None, index: str | None, yes: bool) -> None:
    """Raises KVFetchError."""
    url, _, prefix = text.partition("#")
    store = open_indexed_store(url, token, index)
    try:
        segments = await list_segments(store, prefix)
        size = format_size(sum(segment.stored_bytes for segment in segments))
        typer.echo(f"{text}: {len(segments)} segments, {size}")
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nobody can be asked here: add --yes to delete them")
            typer.confirm("Delete them?", abort=True)
        typer.echo(f"{await store.delete_prefix(prefix)} objects deleted")
    finally:
        await store.close()
