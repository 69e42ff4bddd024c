"""``kvfetch clear`` and ``kvfetch move``: delete a store's segments, or move them to another store."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from msgspec import Struct

from sgl_kvfetch.errors import ConfigError, CorruptError, KVFetchError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, ContentCheck, SegmentKey
from sgl_kvfetch.log import printable
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import PROFILES, AdminStore, ObjectInfo, Store, object_digest
from sgl_kvfetch.stores.notes import pinned_segments
from sgl_kvfetch.stores.upkeep import (
    StoredSegment,
    Swept,
    decode_named_manifest,
    folders_named,
    list_segments,
    names_of_folders,
    sweep_segments,
)
from sgl_kvfetch.tools.target import StorePart, open_existing_store, run_on_part, split_part
from sgl_kvfetch.tools.terminal import (
    MODEL_HELP,
    DryRunOption,
    IndexedAccess,
    PartArgument,
    StoreAccess,
    YesOption,
    ask_to_delete,
    format_size,
    json_flag,
    kept_line,
    make_progress,
    option,
    say,
    show,
)
from sgl_kvfetch.user_files import parse_duration

_AT_ONCE = 4
_SOME_FOLDER = f"{'0' * 32}.0-1"  # of a namespace, for a probe
_CLOCK_S = 1.01  # S3 stores have times in whole seconds

ModelOption = Annotated[str | None, option("NAME", f"Only segments of this model: {MODEL_HELP}")]


class ClearSummary(Struct):
    """Counts of the selected segments and of the deleted objects."""

    num_segments: int  # without the pinned ones that stay
    num_bytes: int
    num_pinned: int  # stay
    num_orphans: int  # data objects without a manifest
    orphan_bytes: int
    num_objects: int | None = None  # deleted; None in a dry run
    are_kept: bool = False  # the bytes: the bucket has versions
    failures: dict[str, str] = {}  # by the object's name


class MoveSummary(Struct):
    """Counts of the moved segments; in a dry run, of those that would be moved."""

    num_moved: int = 0
    num_there: int = 0  # of these, the target had them already
    num_bytes: int = 0  # written to the target
    num_profiles: int = 0
    are_kept: bool = False  # the bytes at the source: the bucket has versions
    failures: dict[str, str] = {}  # by the manifest's name


def clear(
    store: PartArgument,
    access: IndexedAccess,
    model: ModelOption = None,
    older_than: Annotated[
        str | None, option("AGE", "Only segments that were written longer ago, such as 90s, 45m, 12h or 30d.")
    ] = None,
    pinned: Annotated[bool, option(None, "Delete pinned segments, too.", "--pinned")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: Annotated[bool, json_flag(ClearSummary)] = False,
) -> None:
    """Delete all segments of a store, or of a part of it.

    Servers compute deleted prompts again when they need them, and may use the store meanwhile. Pinned segments stay,
    except with --pinned; the pins themselves stay, for segments that are stored later. A token needs the role `admin`,
    or, for a part within one namespace, `write`. To keep the segments that are used most, use `kvfetch gc`. The exit
    code is 1 if some objects could not be deleted, or nothing is stored of the model.

    Examples:

        kvfetch clear http://127.0.0.1:8700

        kvfetch clear http://127.0.0.1:8700 --model llama-70b --older-than 30d --dry-run

        kvfetch clear s3://kv-cache/llama#4f0c --index redis://10.0.0.5:6379/0 --yes
    """
    age_s = None if older_than is None else parse_duration(older_than)
    tell = partial(say, err=as_json)

    async def select_and_delete(part: StorePart) -> ClearSummary:
        """Delete what the options select, once the user has agreed. Return what it was."""
        opened = part.store
        segments = await select_segments(part, model)
        if age_s is not None:
            written_before_s = time.time() - age_s
            segments = [segment for segment in segments if segment.modified_s < written_before_s]
        kept = set() if pinned else await pinned_segments(opened, {segment.key.namespace for segment in segments})
        free = [segment for segment in segments if segment.key not in kept]
        cleared = _summary(free, len(segments) - len(free))
        if cleared.num_pinned:
            tell(f"{cleared.num_pinned} pinned segments stay; --pinned deletes them, too")
        tell(f"{store}: {_amount(cleared)}")
        if dry_run:
            return cleared
        if not yes:
            ask_to_delete(err=as_json)
        if model is None and age_s is None and not cleared.num_pinned:
            swept = Swept(await opened.delete_prefix(part.prefix))  # a few requests, whatever the number of segments
        else:
            swept = await sweep_segments(opened, free, grace_s=0)
        cleared.num_objects, cleared.failures = swept.num_objects, swept.failures
        cleared.are_kept = opened.keeps_deleted
        return cleared

    cleared = run_on_part(store, access, select_and_delete)
    deleted = [] if cleared.num_objects is None else [f"{cleared.num_objects} objects deleted"]
    if cleared.are_kept:
        deleted.append(kept_line(cleared.num_bytes + cleared.orphan_bytes))
    show(cleared, as_json, deleted, cleared.failures)


def _summary(segments: Sequence[StoredSegment], num_pinned: int) -> ClearSummary:
    """Count what will be deleted. Data without a manifest, which a crashed writer left, are no segments."""
    whole = [segment for segment in segments if segment.manifest is not None]
    orphans = [info for segment in segments if segment.manifest is None for info in segment.data.values()]
    num_bytes, orphan_bytes = sum(each.stored_bytes for each in whole), sum(info.size_bytes for info in orphans)
    return ClearSummary(len(whole), num_bytes, num_pinned, len(orphans), orphan_bytes)


def _amount(cleared: ClearSummary) -> str:
    segments = f"{cleared.num_segments} segments, {format_size(cleared.num_bytes)}"
    if not cleared.num_orphans:
        return segments
    return f"{segments}; {cleared.num_orphans} data objects without a manifest, {format_size(cleared.orphan_bytes)}"


def move(
    source: PartArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Another store, of any kind.")],
    access: StoreAccess,
    model: ModelOption = None,
    copy: Annotated[bool, option(None, "Delete nothing at the source.", "--copy")] = False,
    dry_run: DryRunOption = False,
    source_index: Annotated[str | None, option("URL", "The index of an S3 source.")] = None,
    target_index: Annotated[str | None, option("URL", "The index of an S3 target.")] = None,
    as_json: Annotated[bool, json_flag(MoveSummary)] = False,
) -> None:
    """Move all segments of a store, or of a part of it, to another store.

    Each segment is written, read back and compared; so is one that the target has already. In the end, those that the
    target still has are deleted at the source. If the command is interrupted, run it again: it moves the segments that
    are left. Servers may use both stores meanwhile. Manifests stay as they are. Profiles move
    with a whole store, and the newest stays the newest; for those of a part, there is kvfetch profile. Pins are not
    moved. The token is for both stores. The exit code is 1 if some segments could not be moved: they stay; or if
    nothing is stored of the model.

    Examples:

        kvfetch move /var/cache/kv s3://kv-cache/llama --target-index redis://10.0.0.5:6379/0

        kvfetch move http://old:8700#4f0c http://new:8700 --copy

        kvfetch move http://old:8700 http://new:8700 --model llama-70b --dry-run
    """
    url, prefix = split_part(source)
    same = ConfigError(f"SOURCE and TARGET are the same store, under one name or under two: {url}")
    if url.rstrip("/") == target.rstrip("/"):
        raise same

    from_source = IndexedAccess(**asdict(access), index=source_index)

    async def select_and_move(part: StorePart) -> MoveSummary:
        opened, other = part.store, open_existing_store(target, access, target_index)
        try:
            segments = [each for each in await select_segments(part, model) if each.manifest is not None]
            profiles = () if prefix or model is not None else await opened.notes(PROFILES)
            folder = segments[0].key.namespace if segments else _SOME_FOLDER
            if (segments or profiles) and not dry_run and await _is_same(opened, other, folder):
                raise same
            if profiles and not dry_run:  # first: what they are for is of no use without them
                await _move_profiles(opened, other, profiles, copy)
            with make_progress("moving") as progress:
                task = progress.add_task("", total=len(segments))
                moved = await move_segments(opened, other, segments, copy, dry_run, lambda: progress.advance(task))
            moved.num_profiles = len(profiles)
            return moved
        finally:
            await other.close()

    moved = run_on_part(source, from_source, select_and_move)
    verb = "copied" if copy else "moved"
    verb, there, written = (f"would be {verb}", "are", "to write") if dry_run else (verb, "were", "written")
    profiles = f"; {moved.num_profiles} profiles {verb}" if moved.num_profiles else ""
    total = (
        f"{moved.num_moved} segments {verb}, {moved.num_there} of them {there} there already; "
        f"{format_size(moved.num_bytes)} {written}, {len(moved.failures)} failed{profiles}"
    )
    show(moved, as_json, [total, *([kept_line()] if moved.are_kept else [])], moved.failures)


async def select_segments(part: StorePart, model: str | None) -> list[StoredSegment]:
    """List the segments of a part, only those of ``model`` if it is not None.

    If no namespace is of this model, print the models that are stored and exit with 1. Raises StoreError.
    """
    segments = await list_segments(part.store, part.prefix)
    if model is None:
        return segments
    newest_first = sorted(segments, key=lambda segment: segment.modified_s, reverse=True)
    names = await names_of_folders(part.store, newest_first)
    folders = folders_named(model, names)
    if not folders:
        models = sorted({printable(each.labels.model_name(each.model)) for each in names.values() if each.model})
        stored = ", ".join(models) or "no model"
        say(f"kvfetch: nothing is stored of --model {model}; stored: {stored}", err=True)
        raise typer.Exit(1)
    return [segment for segment in segments if segment.key.namespace in folders]


async def move_segments(
    source: AdminStore,
    target: AdminStore,
    segments: list[StoredSegment],
    copy: bool,
    dry_run: bool,
    done: Callable[[], None],
) -> MoveSummary:
    """Move segments, and call ``done`` after each. Note failures of single segments.

    What fails is tried again alone: a small target may lack room for several segments without their manifests. In the
    end, the target is listed: it may have evicted some for others, which then stay at the source. Raises StoreError if
    a whole store fails.
    """
    moved = MoveSummary()
    failed: list[StoredSegment] = []
    copied: list[tuple[StoredSegment, Sequence[str], bool]] = []  # with names of data, and whether it was there

    async def move_one(segment: StoredSegment) -> None:
        """Copy a segment, data before manifest."""
        name = segment.key.manifest_name
        moved.failures.pop(name, None)
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
            copied.append((segment, names, was_there))
        except KVFetchError as e:
            if not e.concerns_object:
                raise
            moved.failures[name] = str(e)
            failed.append(segment)

    async def move_and_tell(segment: StoredSegment) -> None:
        await move_one(segment)
        done()

    await side_by_side(_AT_ONCE, segments, move_and_tell)
    for segment in tuple(failed):
        await move_one(segment)
    folders = sorted({segment.key.namespace for segment, *_ in copied})
    there = {info.name for folder in folders if not dry_run async for info in target.list(f"{folder}/")}

    async def finish(each: tuple[StoredSegment, Sequence[str], bool]) -> None:
        """Count a segment that is at the target now, and delete it at the source if it moves."""
        segment, names, was_there = each
        if not dry_run and segment.key.manifest_name not in there:
            moved.failures[segment.key.manifest_name] = "the target has evicted it for others: it is too small"
            return
        if not (copy or dry_run):
            for name in (segment.key.manifest_name, *sorted({*names, *segment.data})):
                await source.delete(name)
        moved.num_moved += 1
        moved.num_there += was_there

    await side_by_side(_AT_ONCE, copied, finish)
    moved.are_kept = source.keeps_deleted and not (copy or dry_run)
    return moved


async def _move_profiles(source: AdminStore, target: AdminStore, infos: Sequence[ObjectInfo], copy: bool) -> None:
    """Move profiles, the oldest first: which is the newest is for the target's clock to say. Raises StoreError."""
    sizes = {info.name: info.size_bytes for info in await target.notes(PROFILES)}
    for info in sorted(infos, key=lambda info: (info.modified_s, info.name)):
        content = await source.get_note(PROFILES, info.name, info.size_bytes)
        if content is None:
            continue  # withdrawn meanwhile
        is_there = sizes.get(info.name) == info.size_bytes
        if not is_there or await target.get_note(PROFILES, info.name, info.size_bytes) != content:
            await target.put_note(PROFILES, info.name, content)
            await asyncio.sleep(_CLOCK_S)
        if not copy:
            await source.delete_note(PROFILES, info.name)


async def _is_same(source: AdminStore, target: Store, namespace: str) -> bool:
    """Return whether both names are of one store: a move would delete its segments. Puts an object and deletes it."""
    probe = secrets.token_bytes(PAGE_HASH_BYTES)
    name = SegmentKey(namespace, 1, probe).data_name(object_digest(probe))
    await target.put(name, probe)
    try:
        return await source.head(name) is not None
    finally:
        await target.delete(name)


async def _has(target: Store, manifest_name: str, manifest: bytes, names: list[str]) -> bool:
    """Return whether the target has the whole segment, undamaged."""
    if await target.get(manifest_name) != manifest:
        return False
    for name in names:
        content = await target.get(name)
        if content is None or not ContentCheck(name, content).is_sound:
            return False
    return True


async def _copy(source: Store, target: Store, name: str) -> int:
    """Copy a data object, and read it back. Return its size. Raises StoreError and CorruptError."""
    content = await source.get(name)
    if content is None:
        raise StoreError("missing", f"{name} is gone from the source")
    if not ContentCheck(name, content).is_sound:
        raise CorruptError(f"{name} does not match the digest in its name: it is damaged at the source")
    await target.put(name, content)
    found = await target.get(name)
    if found is None:
        raise StoreError("full", f"the target has evicted {name} before its manifest came: it is too small")
    if found != content:
        raise StoreError("protocol", f"{name} came back from the target with other bytes")
    return len(content)
