"""``kvfetch move``: move segments from one store to another."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Annotated

import typer
import xxhash
from msgspec import Struct
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_kvfetch.errors import ConfigError, CorruptError, KVFetchError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, SegmentKey, parse_object_name
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import Store, StoredSegment, decode_named_manifest
from sgl_kvfetch.tools.options import (
    DryRunOption,
    JsonOption,
    TokenFileOption,
    TokenOption,
    make_console,
    print_json,
    read_token,
)
from sgl_kvfetch.tools.selection import STORE_HELP, ModelOption, select_segments
from sgl_kvfetch.tools.target import open_indexed_store
from sgl_kvfetch.tools.units import format_size, printable

_AT_ONCE = 4


class Moved(Struct):
    """What became of the source's segments, or in a dry run, what would become of them."""

    num_moved: int = 0
    num_there: int = 0  # of these, the target had them already
    num_bytes: int = 0  # written to the target
    failures: dict[str, str] = {}  # by the manifest's name


def move(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=STORE_HELP)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Another store, of any kind.")],
    model: ModelOption = None,
    copy: Annotated[bool, typer.Option("--copy", help="Delete nothing at the source.")] = False,
    dry_run: DryRunOption = False,
    source_index: Annotated[str | None, typer.Option(metavar="URL", help="The index of an S3 source.")] = None,
    target_index: Annotated[str | None, typer.Option(metavar="URL", help="The index of an S3 target.")] = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move all segments of a store, or of a part of it, to another store.

    Each segment is written, read back and compared before it is deleted at the source; so is one that the target has
    already. If the command is interrupted, run it again: it goes on with what is left. Servers may use both stores
    meanwhile. Manifests stay as they are, with their signatures; pins are not moved. The token is for both stores. The
    exit code is 1 if some segments could not be moved: they stay.

    Examples:

        kvfetch move /var/cache/kv s3://kv-cache/llama --target-index redis://10.0.0.5:6379/0

        kvfetch move http://old:8700#4f0c http://new:8700 --copy

        kvfetch move http://old:8700 http://new:8700 --model llama-70b --dry-run
    """
    moved = asyncio.run(
        _run(source, target, model, copy, dry_run, source_index, target_index, read_token(token, token_file))
    )
    if as_json:
        print_json(moved)
    else:
        for name, what in moved.failures.items():
            typer.echo(f"FAILED {name}: {printable(what)}")
        verb = "copied" if copy else "moved"
        verb, there, written = (f"would be {verb}", "are", "to write") if dry_run else (verb, "were", "written")
        typer.echo(
            f"{moved.num_moved} segments {verb}, {moved.num_there} of them {there} there already; "
            f"{format_size(moved.num_bytes)} {written}, {len(moved.failures)} failed"
        )
    if moved.failures:
        raise typer.Exit(1)


async def _run(
    text: str,
    target_text: str,
    model: str | None,
    copy: bool,
    dry_run: bool,
    index: str | None,
    target_index: str | None,
    token: str | None,
) -> Moved:
    """Raises KVFetchError."""
    url, _, prefix = text.partition("#")
    if url.rstrip("/") == target_text.rstrip("/"):
        raise _same(url)
    source = open_indexed_store(url, token, index)
    target = open_indexed_store(target_text, token, target_index)
    console = make_console(stderr=True)
    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        segments = [each for each in await select_segments(source, prefix, model) if each.manifest is not None]
        if segments and not dry_run and await _is_same(source, target, segments[0].key):
            raise _same(url)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(segments))
            return await move_segments(source, target, segments, copy, dry_run, lambda: progress.advance(task))
    finally:
        await source.close()
        await target.close()


async def move_segments(
    source: Store, target: Store, segments: list[StoredSegment], copy: bool, dry_run: bool, done: Callable[[], None]
) -> Moved:
    """Move segments, and call ``done`` after each. What concerns one segment alone is noted; raises StoreError for
    what concerns a whole store."""
    moved = Moved()

    async def move_one(segment: StoredSegment) -> None:
        name = segment.key.manifest_name
        try:
            manifest = await source.get(name)
            if manifest is None:
                return  # deleted meanwhile
            names = sorted(decode_named_manifest(manifest, name).data_names)
            was_there = await _has(target, name, manifest, names)
            if dry_run:
                moved.num_bytes += 0 if was_there else segment.stored_bytes
            elif not was_there:
                sizes = [await _copy(source, target, each) for each in names]
                await target.put(name, manifest)
                moved.num_bytes += sum(sizes) + len(manifest)
            if not (copy or dry_run):
                await source.delete(name)
                for each in sorted({*names, *segment.data}):
                    await source.delete(each)
            moved.num_moved += 1
            moved.num_there += was_there
        except KVFetchError as e:
            if isinstance(e, StoreError) and not e.concerns_object:
                raise
            moved.failures[name] = str(e)
        finally:
            done()

    await side_by_side(_AT_ONCE, segments, move_one)
    return moved


def _same(url: str) -> ConfigError:
    return ConfigError(f"SOURCE and TARGET are the same store, under one name or under two: {url}")


async def _is_same(source: Store, target: Store, segment: SegmentKey) -> bool:
    """Whether what is put into the target appears in the source. To move segments would delete them then."""
    probe = secrets.token_bytes(PAGE_HASH_BYTES)
    name = SegmentKey(segment.namespace, 1, probe).data_name(xxhash.xxh3_128_hexdigest(probe))
    await target.put(name, probe)
    try:
        return await source.head(name) is not None
    finally:
        await target.delete(name)


async def _has(target: Store, manifest_name: str, manifest: bytes, names: list[str]) -> bool:
    """Whether the target has the whole segment, undamaged."""
    if await target.get(manifest_name) != manifest:
        return False
    for name in names:
        content = await target.get(name)
        if content is None or not _is_sound(name, content):
            return False
    return True


def _is_sound(name: str, content: bytes) -> bool:
    return xxhash.xxh3_128_hexdigest(content) == parse_object_name(name).content_digest


async def _copy(source: Store, target: Store, name: str) -> int:
    """Copy a data object, and read it back. Return its size. Raises StoreError and CorruptError."""
    content = await source.get(name)
    if content is None:
        raise StoreError("missing", f"{name} is gone from the source")
    if not _is_sound(name, content):
        raise CorruptError(f"{name} does not match the digest in its name: it is damaged at the source")
    await target.put(name, content)
    if await target.get(name) != content:
        raise StoreError("protocol", f"{name} came back from the target with other bytes")
    return len(content)
