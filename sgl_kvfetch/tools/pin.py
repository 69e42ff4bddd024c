"""``kvfetch pin``: keep prompts from being evicted."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from msgspec import Struct

from sgl_kvfetch.stores import Pin, pages_stored
from sgl_kvfetch.tools.options import IndexOption, JsonOption, TokenFileOption, TokenOption, print_json, read_token
from sgl_kvfetch.tools.prompts import (
    FileOption,
    ModelOption,
    PageSizeOption,
    PromptOption,
    SaltOption,
    StoreArgument,
    pins_of,
    stored_text,
)
from sgl_kvfetch.tools.target import open_indexed_store
from sgl_kvfetch.tools.units import printable


class PinSummary(Struct, frozen=True):
    name: str
    label: str
    num_pages: int
    page_size: int
    stored_pages: dict[str, int]  # by namespace


def pin(
    store: StoreArgument,
    prompt: PromptOption = None,
    file: FileOption = None,
    model: ModelOption = None,
    page_size: PageSizeOption = None,
    cache_salt: SaltOption = None,
    label: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the pin is called in the list; by default, how it begins.")
    ] = None,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep prompts' segments from being evicted while there are others, or list the pins.

    A pin holds for all segments with one of the prompt's whole pages, of all models and ranks, stored before or later.
    Without --prompt and --file, the command lists the pins and what is stored of them. kvfetch serve refuses a pin if
    pinned segments would take more than half of its capacity, and wants a token with the role admin. Lifecycle rules
    of a bucket know nothing of pins.

    Examples:

        kvfetch pin http://127.0.0.1:8700 --file system-prompt.txt --model /models/llama --page-size 64

        kvfetch pin http://127.0.0.1:8700
    """
    pins = pins_of(prompt, file, model, page_size, cache_salt, label)
    found = asyncio.run(_pin(store, read_token(token, token_file), index, pins))
    if as_json:
        print_json(found)
        return
    for summary in found:
        typer.echo(f"{summary.name}  {printable(summary.label)}")
        typer.echo(f"  {summary.num_pages} pages of {summary.page_size} tokens; {stored_text(summary.stored_pages)}")
    if not found:
        typer.echo("no pins")


async def _pin(url: str, token: str | None, index: str | None, new: list[Pin]) -> list[PinSummary]:
    """Put new pins. Return them, or all pins if there are no new ones. Raises KVFetchError."""
    store = open_indexed_store(url, token, index)
    try:
        for one in new:
            await store.put_pin(one)
        names = [one.name for one in new] or sorted(await store.pins())
        kept = [kept for name in names if (kept := await store.get_pin(name)) is not None]
        return [
            PinSummary(
                one.name,
                one.label,
                len(one.page_hashes),
                one.page_size,
                await pages_stored(store, one.page_hashes),
            )
            for one in kept
        ]
    finally:
        await store.close()
