"""``kvfetch index``: make the page index of an S3 store anew."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.plane import open_store
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import Store, read_manifest
from sgl_kvfetch.tools.options import INDEX_HELP, INDEX_TIMEOUT_S, JsonOption, make_console, print_json
from sgl_kvfetch.tools.units import printable

if TYPE_CHECKING:
    from sgl_kvfetch.stores import PageIndex

_WORKERS = 16


class Action(StrEnum):
    rebuild = "rebuild"


def index(
    action: Annotated[Action, typer.Argument(help="rebuild: enter the pages of all stored segments.")],
    store: Annotated[str, typer.Option("--store", metavar="URL", help="s3://BUCKET/PREFIX.", show_default=False)],
    index_url: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="URL",
            help=INDEX_HELP,
            show_default=False,
        ),
    ],
    index_ttl_s: Annotated[
        float, typer.Option(min=1, help="Seconds that the index keeps a page that no lookup asks for.")
    ] = 604800.0,
    namespace: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only objects with this name prefix: a namespace or part of one.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Make the page index of an S3 store anew.

    This reads all manifests and enters the pages of those that have not expired. Servers may use store and index
    meanwhile. Nothing is removed: lookups remove the entries that they find to be stale. The exit code is 1 if some
    manifests could not be read, 2 if the store or the index cannot be used.

    Example:

        kvfetch index rebuild --store s3://kv-cache/llama --index redis://10.0.0.5:6379/0
    """
    assert action is Action.rebuild
    tally = asyncio.run(_rebuild(store, index_url, index_ttl_s, namespace))
    if as_json:
        print_json(tally)
    else:
        for name, what in tally.failures.items():
            typer.echo(f"FAILED {name}: {printable(what)}")
        typer.echo(f"{tally.num_segments} segments with {tally.num_pages} pages entered, {len(tally.failures)} failed")
    if tally.failures:
        raise typer.Exit(1)


@dataclass(slots=True)
class Tally:
    num_segments: int = 0
    num_pages: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # by the manifest's name


async def _rebuild(url: str, index_url: str, ttl_s: float, prefix: str) -> Tally:
    """Raises KVFetchError."""
    if not url.startswith("s3:"):
        raise ConfigError(f"{url!r} is not an s3:// store; other stores have their own index")
    store = open_store(url)
    from sgl_kvfetch.stores import IndexOptions, PageIndex  # a missing package is reported by now

    pages = PageIndex(IndexOptions(index_url, ttl_s, INDEX_TIMEOUT_S), url.rstrip("/"))
    tally = Tally()
    console = make_console(stderr=True)
    columns = (TextColumn("entering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        names = [info.name async for info in store.list(prefix) if info.name.endswith(MANIFEST_SUFFIX)]
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            await side_by_side(_WORKERS, progress.track(names), partial(_enter, store, pages, tally))
    finally:
        await pages.close()
        await store.close()
    return tally


async def _enter(store: Store, pages: PageIndex, tally: Tally, name: str) -> None:
    try:
        manifest = await read_manifest(store, name)
    except (FormatError, StoreError) as e:
        if isinstance(e, StoreError) and (e.retriable or e.reason == "unauthorised"):
            raise
        tally.failures[name] = str(e)
        return
    if manifest is not None and not manifest.is_expired(time.time()):  # None: deleted meanwhile
        await pages.add(manifest)
        tally.num_segments += 1
        tally.num_pages += manifest.num_pages
