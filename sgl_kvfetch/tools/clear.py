"""``kvfetch clear``: delete a store's segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from msgspec import Struct

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores.notes import pinned_segments
from sgl_kvfetch.stores.upkeep import (
    StoredSegment,
    Swept,
    folders_named,
    list_segments,
    names_of_folders,
    sweep_segments,
)
from sgl_kvfetch.tools.target import StorePart, run_on_part
from sgl_kvfetch.tools.terminal import (
    MODEL_HELP,
    DryRunOption,
    IndexedAccess,
    PartArgument,
    YesOption,
    ask_to_delete,
    format_size,
    json_flag,
    kept_line,
    option,
    say,
    show,
)


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


def clear(
    store: PartArgument,
    access: IndexedAccess,
    model: Annotated[str | None, option("NAME", f"Only segments of this model: {MODEL_HELP}")] = None,
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

        kvfetch clear http://127.0.0.1:8700 --model llama-70b --dry-run

        kvfetch clear s3://kv-cache/llama#4f0c --index redis://10.0.0.5:6379/0 --yes
    """
    tell = partial(say, err=as_json)

    async def select_and_delete(part: StorePart) -> ClearSummary:
        """Delete what the options select, once the user has agreed. Return what it was."""
        opened = part.store
        segments = await select_segments(part, model)
        keys = [segment.key for segment in segments if segment.manifest is not None]
        kept = set() if pinned else await pinned_segments(opened, keys)
        free = [segment for segment in segments if segment.key not in kept]
        cleared = _summary(free, len(segments) - len(free))
        if cleared.num_pinned:
            tell(f"{cleared.num_pinned} pinned segments stay; --pinned deletes them, too")
        tell(f"{store}: {_amount(cleared)}")
        if dry_run:
            return cleared
        if not yes:
            ask_to_delete(err=as_json)
            if not pinned and await pinned_segments(opened, keys) - kept:
                raise ConfigError("nothing was deleted: more segments are pinned than when it was asked")
        if model is None and not cleared.num_pinned:
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
        say(f"kvfetch: nothing is stored of --model {model!r}; stored: {stored}", err=True)
        raise typer.Exit(1)
    return [segment for segment in segments if segment.key.namespace in folders]
