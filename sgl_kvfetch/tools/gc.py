"""``kvfetch gc``: delete what has expired, and bound the size of a store that does not evict by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane import takes_token
from sgl_kvfetch.sizes import parse_size
from sgl_kvfetch.stores import Plan, Swept, plan_sweep, sweep_segments
from sgl_kvfetch.tools.options import INDEX_HELP, DryRunOption, JsonOption, print_json
from sgl_kvfetch.tools.target import open_indexed_store
from sgl_kvfetch.tools.units import format_age, format_size, printable


def gc(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="s3://BUCKET/PREFIX, file:///DIRECTORY or a directory.")
    ],
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most bytes that stay, such as 10TiB, manifests included."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=SIZE",
            help="Most bytes that stay of this model: its name or model_id, as kvfetch inspect shows it; a "
            "fingerprint, a namespace; or the beginning of one of these, if no model has that very name. Repeatable.",
        ),
    ] = None,
    index: Annotated[str | None, typer.Option(metavar="URL", help=f"The index of an S3 store: {INDEX_HELP}")] = None,
    dry_run: DryRunOption = False,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace", min=0, metavar="SECONDS", help="How long data stays behind its manifest, for its readers."
        ),
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Delete expired segments of an S3 store or a directory, and the least recently used until the rest fits.

    Without --capacity and --quota, only expired segments go. The command lists the store once. In S3 it also reads all
    manifests, since only they say when segments expire. With --index, it knows when servers last found each segment,
    removes deleted segments from the index, and does not run twice at a time. Without, S3 segments go by the time they
    were written. It also deletes what writers that died have left. Servers may use the store meanwhile.

    kvfetch serve needs no gc for its capacity: it evicts at every write. For quotas, run gc on its directory, beside
    it. The exit code is 1 if some objects could not be deleted or a quota's model has nothing stored, 2 if the store or
    the index cannot be used, or another gc is at work.

    Example, for cron:

        kvfetch gc s3://kv-cache/llama --index redis://10.0.0.5:6379/0 --capacity 10TiB
    """
    if takes_token(store):
        raise ConfigError(
            f"{store} evicts by itself: start it with kvfetch serve --capacity; for quotas, run gc on its directory"
        )
    limits = None if capacity is None else parse_size(capacity), _parse_quotas(quota or [])
    plan, swept = asyncio.run(_run(store, index, limits, dry_run, grace_s))
    if as_json:
        print_json(_summary(plan, swept))
    else:
        _print(plan, swept)
    if plan.unused_quotas or (swept is not None and swept.failures):
        raise typer.Exit(1)


async def _run(
    text: str, index: str | None, limits: tuple[int | None, dict[str, int]], dry_run: bool, grace_s: float
) -> tuple[Plan, Swept | None]:
    """Raises KVFetchError."""
    store = open_indexed_store(text, None, index)
    try:
        if dry_run:
            return await plan_sweep(store, *limits), None
        async with store.sweeping():
            plan = await plan_sweep(store, *limits)
            return plan, await sweep_segments(store, plan.doomed, grace_s)
    finally:
        await store.close()


def _parse_quotas(texts: Sequence[str]) -> dict[str, int]:
    """Raises ConfigError."""
    quotas: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")  # a model's name may contain "="
        if not name or name in quotas:
            raise ConfigError(f"--quota {text!r}: expected MODEL=SIZE, each MODEL once")
        quotas[name] = parse_size(size)
    return quotas


def _summary(plan: Plan, swept: Swept | None) -> dict[str, object]:
    return {
        "stored_bytes": plan.stored_bytes,
        "num_segments": plan.num_segments,
        "pinned_bytes": plan.pinned_bytes,
        "num_expired": plan.num_expired,
        "evicted": [segment.key.stem for segment in plan.evicted],
        "broken": [segment.key.stem for segment in plan.broken],
        "planned_bytes": plan.freed_bytes,
        "oldest_use_s": plan.oldest_use_s,
        "unused_quotas": plan.unused_quotas,
        "deleted": swept,  # None in a dry run
    }


def _print(plan: Plan, swept: Swept | None) -> None:
    if swept is None:
        for segment in plan.doomed:
            typer.echo(f"{segment.key.stem}  {format_size(segment.stored_bytes)}")
    else:
        for name, what in swept.failures.items():
            typer.echo(f"FAILED {name}: {printable(what)}")
    for name in plan.unused_quotas:
        typer.echo(f"WARNING: nothing is stored of --quota {printable(name)}")
    num_kept = plan.num_segments - len(plan.evicted)
    verb = "would delete" if swept is None else "deleted"
    freed = format_size(plan.freed_bytes if swept is None else swept.num_bytes)
    typer.echo(
        f"{verb} {len(plan.evicted)} segments, {plan.num_expired} of them expired, and {len(plan.broken)} that are not "
        f"whole: {freed} of {format_size(plan.stored_bytes)}"
    )
    if plan.num_pinned_evicted:
        typer.echo(
            f"WARNING: {plan.num_pinned_evicted} of them are pinned; {format_size(plan.pinned_bytes)} are pinned"
        )
    if plan.oldest_use_s is not None:
        age = format_age(time.time() - plan.oldest_use_s)
        typer.echo(f"{num_kept} segments stay; the least recently used of them was last used {age} ago")
