"""``kvfetch inspect``: show what a store, a segment or a file holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sgl_kvfetch.codec import Manifest, ManifestKeys, SegmentReader, quantiser_from_identity
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.stores import StoredSegment, decode_named_manifest, list_segments
from sgl_kvfetch.tools.options import (
    TARGET_HELP,
    JsonOption,
    ManifestKeyFileOption,
    TokenFileOption,
    TokenOption,
    make_console,
    print_json,
    read_keys,
    read_token,
)
from sgl_kvfetch.tools.pictures import PictureWriter
from sgl_kvfetch.tools.signatures import Signature, signature_of
from sgl_kvfetch.tools.summary import SegmentSummary, summarise_segment, summarise_store
from sgl_kvfetch.tools.tables import segment_tables, segments_tables, store_tables
from sgl_kvfetch.tools.target import Target, open_target

_Draw = Callable[[Target, Manifest], Awaitable[None]]


def inspect(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    manifest_key_file: ManifestKeyFileOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(min=1, help="Namespaces or segments to show.")] = 20,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY", help="Write the frames of one segment there, as pictures, with a contact sheet."
        ),
    ] = None,
    span: Annotated[int, typer.Option(min=0, help="With --png: index of the span to draw.")] = 0,
    max_frames: Annotated[int, typer.Option(min=1, help="With --png: most frames to write from a chunk.")] = 4,
) -> None:
    """Show what is stored: by namespace, by segment, or chunk by chunk, and how it compares with raw KV.

    For a store, the command lists its namespaces, the largest first, with the ages of their oldest and newest
    segments; for a namespace, its segments; for one segment, every chunk. With several models, it also says how many
    bytes each takes. Sizes include scales and manifests. Segments of a namespace that overlap are counted separately.
    With --manifest-key-file, the command says of each segment listed or shown whether its signature is good.

    Examples:

        kvfetch inspect http://127.0.0.1:8700

        kvfetch inspect http://127.0.0.1:8700#4f0c

        kvfetch inspect file:///var/cache/kv#4f0c...e1/8-91ab --png pictures
    """
    draw = None if png is None else partial(_draw, directory=png, span=span, max_frames=max_frames, as_json=as_json)
    asyncio.run(_run(target, read_token(token, token_file), read_keys(manifest_key_file), as_json, limit, draw))


async def _run(
    text: str, token: str | None, keys: ManifestKeys | None, as_json: bool, limit: int, draw: _Draw | None
) -> None:
    """Print the target's summary, and draw its frames if ``draw`` is given. Raises KVFetchError."""
    target = open_target(text, token)
    try:
        segments = await list_segments(target.objects, target.prefix)
        if target.prefix and not segments:
            raise ConfigError(f"{target.label}: nothing is stored under this name")
        whole = [s for s in segments if s.manifest is not None]
        single = len(whole) == 1 and (target.prefix or draw)
        if draw is not None and not single:
            raise ConfigError(f"--png expects one segment, {target.label} holds {len(whole)}; name one as STORE#NAME")
        if single:
            await _show_segment(target, whole[0], keys, as_json, draw)
        elif target.prefix:
            await _show_segments(target, whole, len(segments) - len(whole), keys, as_json, limit)
        else:
            summary = await summarise_store(target.objects, segments)
            _print(summary, store_tables(target.label, summary, limit), as_json)
    finally:
        await target.objects.close()


async def _show_segments(
    target: Target,
    segments: Sequence[StoredSegment],
    num_orphans: int,
    keys: ManifestKeys | None,
    as_json: bool,
    limit: int,
) -> None:
    """Print the first ``limit`` segments. In each namespace the longest come first."""
    in_order = sorted(segments, key=lambda s: (s.key.namespace, -s.key.num_pages, s.key.last_page_hash))
    summaries: list[SegmentSummary] = []
    unreadable: list[str] = []
    for stored in in_order[:limit]:
        assert stored.manifest is not None
        try:
            summaries.append(summarise_segment(stored, *await _require_manifest(target, stored, keys)))
        except FormatError as e:
            unreadable.append(f"{stored.manifest.name}: {e}")
    notes = list(unreadable)
    if len(in_order) > limit:
        notes.append(f"... and {len(in_order) - limit} more segments (--limit)")
    if num_orphans:
        notes.append(f"{num_orphans} segments have data but no manifest: still being written, or left by a crash")
    _print(summaries, [*segments_tables(summaries), *notes], as_json)


async def _show_segment(
    target: Target, stored: StoredSegment, keys: ManifestKeys | None, as_json: bool, draw: _Draw | None
) -> None:
    manifest, signature = await _require_manifest(target, stored, keys)
    summary = summarise_segment(stored, manifest, signature)
    _print(summary, segment_tables(summary), as_json)
    if draw is not None:
        await draw(target, manifest)


async def _require_manifest(
    target: Target, stored: StoredSegment, keys: ManifestKeys | None
) -> tuple[Manifest, Signature]:
    assert stored.manifest is not None
    content = await target.objects.get(stored.manifest.name)
    if content is None:
        raise StoreError("missing", f"{stored.manifest.name} was deleted after it was listed")
    return decode_named_manifest(content, stored.manifest.name), signature_of(content, keys)


async def _draw(
    target: Target, manifest: Manifest, *, directory: Path, span: int, max_frames: int, as_json: bool
) -> None:
    """Decode one span cell by cell and write its pictures."""
    if span >= manifest.num_spans:
        raise ConfigError(f"--span {span}: the segment has {manifest.num_spans}, counted from 0")
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    writer = PictureWriter(directory, reader, max_frames)
    for cell in manifest.span_cells(span):
        start, end = reader.cell_range(cell)
        data = await target.objects.get(reader.data_name, start, end - start)
        if data is None:
            raise StoreError("missing", f"{reader.data_name} is gone")
        for line in writer.write_cell(cell, reader.decode_cell(cell, data)):
            typer.echo(line, err=as_json)
    typer.echo(f"contact sheet: {writer.write_contact_sheet()}", err=as_json)


def _print(summary: object, tables: Iterable[Table | str], as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    console = make_console()
    for item in tables:
        # Names are long. They must not be wrapped, so that users can copy them.
        console.print(item, soft_wrap=isinstance(item, str))
