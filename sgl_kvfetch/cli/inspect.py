"""``kvfetch inspect``: show what a store, a segment or a file holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from sgl_kvfetch.cli.options import TARGET_HELP, JsonOption, TokenFileOption, TokenOption, make_console, read_token
from sgl_kvfetch.cli.pictures import PictureWriter
from sgl_kvfetch.cli.summary import SegmentSummary, summarise_segment, summarise_store
from sgl_kvfetch.cli.tables import segment_tables, segments_tables, store_tables
from sgl_kvfetch.cli.target import Target, open_target
from sgl_kvfetch.container.manifest import Manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.quant import quantiser_from_identity
from sgl_kvfetch.stores.listing import StoredSegment, list_segments, read_manifest


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Which frames of a segment to draw, and where to write them."""

    directory: Path
    span: int
    max_frames: int


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
    span: Annotated[int, typer.Option(min=0, help="With --png: index of the span to draw.")] = 0,
    max_frames: Annotated[int, typer.Option(min=1, help="With --png: most frames to write from a chunk.")] = 4,
) -> None:
    """Show what is stored: by namespace, by segment, or chunk by chunk, and how it compares with raw KV.

    For a store, the command lists its namespaces; for a namespace, its segments; for one segment, every chunk. Sizes
    include scales and manifests. Segments of a namespace that overlap are counted separately.

    Examples:

        kvfetch inspect http://127.0.0.1:8700

        kvfetch inspect http://127.0.0.1:8700#4f0c

        kvfetch inspect file:///var/cache/kv#4f0c...e1/8-91ab --png pictures
    """
    drawing = None if png is None else _Drawing(png, span, max_frames)
    asyncio.run(_run(target, read_token(token, token_file), as_json, limit, drawing))


async def _run(text: str, token: str | None, as_json: bool, limit: int, drawing: _Drawing | None) -> None:
    """Print the target's summary, and draw its frames if ``drawing`` is given. Raises KVFetchError."""
    target = open_target(text, token)
    try:
        segments = await list_segments(target.objects, target.prefix)
        if target.prefix and not segments:
            raise ConfigError(f"{target.label}: nothing is stored under this name")
        whole = [s for s in segments if s.manifest is not None]
        single = len(whole) == 1 and (target.prefix or drawing)
        if drawing is not None and not single:
            raise ConfigError(f"--png expects one segment, {target.label} holds {len(whole)}; name one as STORE#NAME")
        if single:
            await _show_segment(target, whole[0], as_json, drawing)
        elif target.prefix:
            await _show_segments(target, whole, len(segments) - len(whole), as_json, limit)
        else:
            summary = await summarise_store(target.objects, segments)
            _print(summary, store_tables(target.label, summary, limit), as_json)
    finally:
        await target.objects.close()


async def _show_segments(
    target: Target, segments: Sequence[StoredSegment], num_orphans: int, as_json: bool, limit: int
) -> None:
    """Print the first ``limit`` segments. In each namespace the longest come first."""
    in_order = sorted(segments, key=lambda s: (s.key.namespace, -s.key.num_pages, s.key.last_page_hash))
    summaries: list[SegmentSummary] = []
    unreadable: list[str] = []
    for stored in in_order[:limit]:
        assert stored.manifest is not None
        try:
            summaries.append(summarise_segment(stored, await _require_manifest(target, stored)))
        except FormatError as e:
            unreadable.append(f"{stored.manifest.name}: {e}")
    notes = list(unreadable)
    if len(in_order) > limit:
        notes.append(f"... and {len(in_order) - limit} more segments (--limit)")
    if num_orphans:
        notes.append(f"{num_orphans} segments have data but no manifest: still being written, or left by a crash")
    _print(summaries, [*segments_tables(summaries), *notes], as_json)


async def _show_segment(target: Target, stored: StoredSegment, as_json: bool, drawing: _Drawing | None) -> None:
    manifest = await _require_manifest(target, stored)
    summary = summarise_segment(stored, manifest)
    _print(summary, segment_tables(summary), as_json)
    if drawing is not None:
        await _draw(target, manifest, drawing, as_json)


async def _require_manifest(target: Target, stored: StoredSegment) -> Manifest:
    assert stored.manifest is not None
    manifest = await read_manifest(target.objects, stored.manifest.name)
    if manifest is None:
        raise StoreError("missing", f"{stored.manifest.name} was deleted after it was listed")
    return manifest


async def _draw(target: Target, manifest: Manifest, drawing: _Drawing, as_json: bool) -> None:
    """Decode one span cell by cell and write its pictures."""
    if drawing.span >= manifest.num_spans:
        raise ConfigError(f"--span {drawing.span}: the segment has {manifest.num_spans}, counted from 0")
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    writer = PictureWriter(drawing.directory, reader, drawing.max_frames)
    for cell in manifest.span_cells(drawing.span):
        start, end = reader.cell_range(cell)
        data = await target.objects.get(reader.data_name, start, end - start)
        if data is None:
            raise StoreError("missing", f"{reader.data_name} is gone")
        for line in writer.write_cell(cell, reader.decode_cell(cell, data)):
            typer.echo(line, err=as_json)
    typer.echo(f"contact sheet: {writer.write_contact_sheet()}", err=as_json)


def _print(summary: object, tables: Iterable[Table | str], as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
        return
    console = make_console()
    for item in tables:
        # Names are long. They must not be wrapped, so that users can copy them.
        console.print(item, soft_wrap=isinstance(item, str))
