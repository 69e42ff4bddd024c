"""``kvfetch clear``: delete what a store holds."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores import Swept, pinned_segments, sweep_segments
from sgl_kvfetch.tools.options import DryRunOption, IndexOption, TokenFileOption, TokenOption, read_token
from sgl_kvfetch.tools.selection import STORE_HELP, ModelOption, select_segments
from sgl_kvfetch.tools.target import open_indexed_store
from sgl_kvfetch.tools.units import format_size, parse_age, printable


def clear(
    store: Annotated[str, typer.Argument(metavar="STORE", help=STORE_HELP)],
    model: ModelOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only segments that were written longer ago, such as 90s, 45m, 12h or 30d."),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Delete pinned segments, too.")] = False,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Delete all segments of a store, or of a part of it.

    What is deleted is computed again when it is needed; servers may use the store meanwhile. Pinned segments stay,
    except with --pinned; then the pins stay, for what is stored later. A token needs the role `admin`, or, for a part
    within one namespace, `write`. To keep what is used most, use `kvfetch gc`. The exit code is 1 if some objects could
    not be deleted.

    Examples:

        kvfetch clear http://127.0.0.1:8700

        kvfetch clear http://127.0.0.1:8700 --model llama-70b --older-than 30d --dry-run

        kvfetch clear s3://kv-cache/llama#4f0c --index redis://10.0.0.5:6379/0 --yes
    """
    age_s = None if older_than is None else parse_age(older_than)
    asyncio.run(_run(store, read_token(token, token_file), index, model, age_s, pinned, dry_run, yes))


async def _run(
    text: str,
    token: str | None,
    index: str | None,
    model: str | None,
    age_s: float | None,
    pinned: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Raises KVFetchError."""
    url, _, prefix = text.partition("#")
    store = open_indexed_store(url, token, index)
    try:
        segments = await select_segments(store, prefix, model)
        if age_s is not None:
            written_before_s = time.time() - age_s
            segments = [segment for segment in segments if segment.modified_s < written_before_s]
        selects = model is not None or age_s is not None
        if not pinned:
            kept = await pinned_segments(store, {segment.key.namespace for segment in segments})
            num_all = len(segments)
            segments = [segment for segment in segments if segment.key not in kept]
            if len(segments) < num_all:
                selects = True
                typer.echo(f"{num_all - len(segments)} pinned segments stay; --pinned deletes them, too")
        size = format_size(sum(segment.stored_bytes for segment in segments))
        typer.echo(f"{text}: {len(segments)} segments, {size}")
        if dry_run:
            return
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nobody can be asked here: add --yes to delete them")
            typer.confirm("Delete them?", abort=True)
        if selects:
            swept = await sweep_segments(store, segments, grace_s=0)
        else:  # a few requests, whatever the number of segments
            swept = Swept(await store.delete_prefix(prefix))
    finally:
        await store.close()
    for name, what in swept.failures.items():
        typer.echo(f"FAILED {name}: {printable(what)}")
    typer.echo(f"{swept.num_objects} objects deleted")
    if swept.failures:
        raise typer.Exit(1)
