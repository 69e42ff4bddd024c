"""``kvfetch unpin``: let pinned prompts be evicted."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.tools.options import IndexOption, TokenFileOption, TokenOption, read_token
from sgl_kvfetch.tools.prompts import (
    FileOption,
    ModelOption,
    PageSizeOption,
    PromptOption,
    SaltOption,
    StoreArgument,
    pins_of,
)
from sgl_kvfetch.tools.target import open_indexed_store


def unpin(
    store: StoreArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Pins, as kvfetch pin STORE lists them.")
    ] = None,
    prompt: PromptOption = None,
    file: FileOption = None,
    model: ModelOption = None,
    page_size: PageSizeOption = None,
    cache_salt: SaltOption = None,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Let pinned prompts' segments be evicted like others.

    Name the pins, or give the same prompts as to kvfetch pin. The exit code is 1 if one of them was not there.

    Example:

        kvfetch unpin http://127.0.0.1:8700 --file system-prompt.txt --model /models/llama --page-size 64
    """
    wanted = [*(names or ()), *(pin.name for pin in pins_of(prompt, file, model, page_size, cache_salt, None))]
    if not wanted:
        raise ConfigError("expected the name of a pin, --prompt or --file")
    missing = asyncio.run(_unpin(store, read_token(token, token_file), index, wanted))
    for name in missing:
        typer.echo(f"there was no pin {name}", err=True)
    typer.echo(f"{len(wanted) - len(missing)} unpinned")
    if missing:
        raise typer.Exit(1)


async def _unpin(url: str, token: str | None, index: str | None, names: list[str]) -> list[str]:
    """Return the names of which there was no pin. Raises KVFetchError."""
    store = open_indexed_store(url, token, index)
    try:
        return [name for name in names if not await store.delete_pin(name)]
    finally:
        await store.close()
