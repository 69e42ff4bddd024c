"""``kvfetch lookup``: say how much of a prompt is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import Tokens
from sgl_kvfetch.tools.options import IndexOption, JsonOption, TokenFileOption, TokenOption, read_token
from sgl_kvfetch.tools.prompts import (
    FileOption,
    ModelOption,
    PromptOption,
    SaltOption,
    StoreArgument,
    StoredPrompt,
    print_stored,
    prompts_of,
    stored_prompt,
    tokens_of,
)
from sgl_kvfetch.tools.target import open_indexed_store


def lookup(
    store: StoreArgument,
    page_size: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="SGLang's --page-size.", show_default=False)],
    prompt: PromptOption = None,
    file: FileOption = None,
    model: ModelOption = None,
    cache_salt: SaltOption = None,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many of a prompt's pages a lookup finds, by namespace.

    Counted are whole pages from the prompt's beginning on, for which the heads of all ranks are stored. A lookup counts
    as a use of the segments that it finds.

    Examples:

        kvfetch lookup http://127.0.0.1:8700 --file system-prompt.txt --model /models/llama --page-size 64

        kvfetch lookup http://127.0.0.1:8700 --prompt '[1, 2, 3, 4]' --page-size 2
    """
    prompts = prompts_of(prompt, file)
    if not prompts:
        raise ConfigError("expected --prompt or --file")
    tokens = tokens_of(prompts, model)
    print_stored(
        asyncio.run(_look_up(store, read_token(token, token_file), index, tokens, page_size, cache_salt)), as_json
    )


async def _look_up(
    url: str, token: str | None, index: str | None, prompts: Sequence[Tokens], page_size: int, cache_salt: str | None
) -> list[StoredPrompt]:
    """Raises KVFetchError."""
    store = open_indexed_store(url, token, index)
    try:
        return [await stored_prompt(store, tokens, page_size, cache_salt) for tokens in prompts]
    finally:
        await store.close()
