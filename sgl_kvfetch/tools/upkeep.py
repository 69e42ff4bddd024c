"""``kvfetch gc`` and ``kvfetch reindex``: the upkeep of stores that no ``kvfetch serve`` looks after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import AdminStore
from sgl_kvfetch.stores.upkeep import Plan, Swept, plan_sweep, read_manifest, sweep_segments
from sgl_kvfetch.tools.target import INDEX_TIMEOUT_S, StorePart, run_on_part, run_on_store
from sgl_kvfetch.tools.terminal import (
    INDEX_HELP,
    DryRunOption,
    IndexedAccess,
    IndexOption,
    StoreAccess,
    StoreArgument,
    YesOption,
    ask_to_delete,
    format_age,
    format_size,
    json_flag,
    kept_line,
    make_progress,
    option,
    say,
    show,
)
from sgl_kvfetch.user_files import parse_size

_WORKERS = 16


def gc(
    store: StoreArgument,
    capacity: Annotated[str | None, option("SIZE", "Most bytes that stay, such as 10TiB, manifests included.")] = None,
    drop_levels: Annotated[
        int,
        option(
            "COUNT",
            "Instead of deleting segments, drop up to so many levels of them, the least recently used first.",
            min=0,
            max=3,
        ),
    ] = 0,
    index: IndexOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    grace_s: Annotated[
        float,
        option("SECONDS", "How long data stays after its manifest is deleted, for its readers.", "--grace", min=0),
    ] = 60.0,
    as_json: Annotated[
        bool,
        json_flag(
            "an object with stored_bytes, num_segments, pinned_bytes, num_expired, evicted, broken, coarser, "
            "planned_bytes, oldest_use_s and deleted (null in a dry run), which has num_objects, "
            "num_bytes, num_levels, are_kept and failures"
        ),
    ] = False,
) -> None:
    """Delete expired segments of an S3 store or a directory, and the least recently used until the rest fits.

    Without --capacity, it deletes only expired segments. The command lists the store once. In S3 it also
    reads all manifests, since only they say when segments expire. With --index, it knows when servers last found each
    segment, removes deleted segments from the index, and does not run twice at a time. Without it, the oldest S3
    segments go first. The command also deletes leftovers of writers that died. Servers may use the store meanwhile.
    Without --yes, it shows what it would delete, and asks.

    kvfetch serve needs no gc: it evicts at every write. Models with a prefix of a bucket each can have a capacity each.
    The exit code is 1 if some objects could not be deleted, 2 if the store or the index cannot be used, or another gc
    is at work.

    Example, for cron:

        kvfetch gc s3://kv-cache/llama --index redis://10.0.0.5:6379/0 --capacity 10TiB --yes
    """
    if store.startswith(("http://", "https://")):
        raise ConfigError(f"{store} evicts by itself: start it with kvfetch serve --capacity")
    capacity_bytes = None if capacity is None else parse_size(capacity)
    tell = partial(say, err=True)

    async def collect(opened: AdminStore) -> tuple[Plan, Swept | None]:
        if dry_run:
            return await plan_sweep(opened, capacity_bytes, drop_levels), None
        if drop_levels:
            await opened.require_replace()
        if not yes:  # before the lock is taken: it lasts for seconds, and people think for minutes
            plan = await plan_sweep(opened, capacity_bytes, drop_levels)
            if plan.doomed or plan.coarser:
                for line in _gc_lines(plan, None):
                    say(line, err=as_json)
                ask_to_delete(err=as_json)
        async with opened.sweeping():
            plan = await plan_sweep(opened, capacity_bytes, drop_levels)
            return plan, await sweep_segments(opened, plan.doomed, grace_s, plan.coarser, tell)

    plan, swept = run_on_store(store, IndexedAccess(index=index), collect)
    show(_summary(plan, swept), as_json, _gc_lines(plan, swept), {} if swept is None else swept.failures)


def _summary(plan: Plan, swept: Swept | None) -> dict[str, object]:
    return {
        "stored_bytes": plan.stored_bytes,
        "num_segments": plan.num_segments,
        "pinned_bytes": plan.pinned_bytes,
        "num_expired": plan.num_expired,
        "evicted": [segment.key.stem for segment in plan.evicted],
        "broken": [segment.key.stem for segment in plan.broken],
        "coarser": {each.segment.key.stem: each.num_levels for each in plan.coarser},
        "planned_bytes": plan.freed_bytes,
        "oldest_use_s": plan.oldest_use_s,
        "deleted": swept,  # None in a dry run
    }


def _gc_lines(plan: Plan, swept: Swept | None) -> Iterator[str]:
    """Yield what gc has deleted, or would delete."""
    if swept is None:
        for segment in plan.doomed:
            yield f"{segment.key.stem}  {format_size(segment.stored_bytes)}"
        for each in plan.coarser:
            yield f"{each.segment.key.stem}  {format_size(each.num_bytes)}, {each.num_levels} levels"
    verb = "would delete" if swept is None else "deleted"
    count = sum(each.num_levels for each in plan.coarser) if swept is None else swept.num_levels
    levels = f", and {count} levels of others" if count else ""
    freed = format_size(plan.freed_bytes if swept is None else 0 if swept.are_kept else swept.num_bytes)
    yield (
        f"{verb} {len(plan.evicted)} segments, {plan.num_expired} of them expired, and {len(plan.broken)} that are not "
        f"whole{levels}: {freed} of {format_size(plan.stored_bytes)}"
    )
    if swept is not None and swept.are_kept and swept.num_bytes:
        yield kept_line(swept.num_bytes)
    if plan.num_pinned_evicted:
        yield f"WARNING: {plan.num_pinned_evicted} of them are pinned; {format_size(plan.pinned_bytes)} are pinned"
    if plan.oldest_use_s is not None:
        age, num_kept = format_age(time.time() - plan.oldest_use_s), plan.num_segments - len(plan.evicted)
        yield f"{num_kept} segments stay; the least recently used of them was last used {age} ago"


@dataclass(slots=True)
class Entered:
    """Counts of the entries made in an index."""

    num_segments: int = 0
    num_pages: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # by the manifest's name


def reindex(
    store: Annotated[str, typer.Argument(metavar="STORE", help="s3://BUCKET/PREFIX, or a part of it: STORE#PREFIX.")],
    index_url: Annotated[str, option("URL", INDEX_HELP, "--index", show_default=False)],
    as_json: Annotated[bool, json_flag(Entered)] = False,
) -> None:
    """Rebuild the page index of an S3 store.

    This reads all manifests and enters the pages of those that have not expired. Servers may use store and index
    meanwhile. Nothing is removed: lookups remove the entries that they find to be stale. A page that no lookup asks for
    leaves the index after seven days. The exit code is 1 if some manifests could not be read, 2 if the store or the
    index cannot be used.

    Example:

        kvfetch reindex s3://kv-cache/llama --index redis://10.0.0.5:6379/0
    """
    if not store.startswith("s3:"):
        raise ConfigError(f"{store!r} is not an s3:// store; other stores have their own index")

    async def rebuild(part: StorePart) -> Entered:
        """Enter all segments into the index. Return how many, and which could not be read."""
        from sgl_kvfetch.stores.redis_index import IndexOptions, PageIndex  # a missing package is reported by now

        entered = Entered()
        pages = PageIndex(IndexOptions(index_url, timeout_s=INDEX_TIMEOUT_S), part.name.rstrip("/"))

        async def enter(name: str) -> None:
            try:
                manifest = await read_manifest(part.store, name)
            except (FormatError, StoreError) as e:
                if isinstance(e, StoreError) and (e.retriable or e.reason == "unauthorised"):
                    raise
                entered.failures[name] = str(e)
                return
            if manifest is not None and not manifest.is_expired(time.time()):  # None: deleted meanwhile
                await pages.add(manifest)
                entered.num_segments += 1
                entered.num_pages += manifest.num_pages

        try:
            names = [info.name async for info in part.store.list(part.prefix) if info.name.endswith(MANIFEST_SUFFIX)]
            with make_progress("entering") as progress:
                await side_by_side(_WORKERS, progress.track(names), enter)
        finally:
            await pages.close()
        return entered

    entered = run_on_part(store, StoreAccess(), rebuild)
    total = f"{entered.num_segments} segments with {entered.num_pages} pages entered, {len(entered.failures)} failed"
    show(entered, as_json, [total], entered.failures)
