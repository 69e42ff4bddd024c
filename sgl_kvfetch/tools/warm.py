"""``kvfetch warm``: have an SGLang server compute and store prompts before they are needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import typer

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.prompts import Prompt, Tokens
from sgl_kvfetch.stores import Store
from sgl_kvfetch.tools.options import IndexOption, JsonOption, TokenFileOption, TokenOption, read_token
from sgl_kvfetch.tools.prompts import (
    FileOption,
    PromptOption,
    SaltOption,
    StoreArgument,
    StoredPrompt,
    print_stored,
    prompts_of,
    stored_prompt,
)
from sgl_kvfetch.tools.target import open_indexed_store

API_KEY_ENV = "SGLANG_API_KEY"
_LOOK_EVERY_S = 0.5


def warm(
    store: StoreArgument,
    server: Annotated[
        str, typer.Option(metavar="URL", help="An SGLang server that writes to the store.", show_default=False)
    ],
    prompt: PromptOption = None,
    file: FileOption = None,
    cache_salt: SaltOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait until all is stored.")
    ] = 60.0,
    index: IndexOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send prompts through an SGLang server, and say what of each is stored then.

    The server's tokenizer and page size count. Each prompt costs its prefill and one token. Of a prompt, only whole
    pages are stored. A server with an API key needs it as SGLANG_API_KEY in the environment. The exit code is 1 if
    some pages are not stored in time.

    Example:

        kvfetch warm http://127.0.0.1:8700 --server http://127.0.0.1:30000 --file prompts.jsonl
    """
    prompts = prompts_of(prompt, file)
    if not prompts:
        raise ConfigError("expected --prompt or --file")
    warmed = asyncio.run(
        _warm(store, read_token(token, token_file), index, server.rstrip("/"), prompts, cache_salt, timeout_s)
    )
    print_stored(warmed, as_json)
    if not all(_is_stored(one) for one in warmed):
        raise typer.Exit(1)


async def _warm(
    url: str,
    token: str | None,
    index: str | None,
    server: str,
    prompts: Sequence[Prompt],
    cache_salt: str | None,
    timeout_s: float,
) -> list[StoredPrompt]:
    """Raises KVFetchError."""
    store = open_indexed_store(url, token, index)
    key = os.environ.get(API_KEY_ENV)
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else None) as session:
            page_size = int((await _ask(session, "GET", f"{server}/server_info"))["page_size"])
            sent = [await _compute(session, server, prompt, cache_salt) for prompt in prompts]
        until = asyncio.get_running_loop().time() + timeout_s
        return [await _wait_for(store, tokens, page_size, cache_salt, until) for tokens in sent]
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as e:
        raise StoreError("protocol", f"{server}: {type(e).__name__}: {e}") from e
    finally:
        await store.close()


async def _compute(session: aiohttp.ClientSession, server: str, prompt: Prompt, cache_salt: str | None) -> Tokens:
    """Send a prompt through the server. Return its tokens."""
    if isinstance(prompt, str):
        prompt = list((await _ask(session, "POST", f"{server}/tokenize", {"prompt": prompt}))["tokens"])
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    await _ask(session, "POST", f"{server}/generate", body | ({"cache_salt": cache_salt} if cache_salt else {}))
    return prompt


async def _ask(session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    async with session.request(method, url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as response:
        if response.status != 200:
            raise StoreError("server", f"{url} answered {response.status}: {(await response.text())[:500]}")
        return await response.json()


async def _wait_for(store: Store, tokens: Tokens, page_size: int, cache_salt: str | None, until: float) -> StoredPrompt:
    """Wait until a prompt is stored, at most until then. Look once at least."""
    while True:
        found = await stored_prompt(store, tokens, page_size, cache_salt)
        if _is_stored(found) or asyncio.get_running_loop().time() > until:
            return found
        await asyncio.sleep(_LOOK_EVERY_S)


def _is_stored(prompt: StoredPrompt) -> bool:
    return prompt.num_pages in (0, *prompt.stored_pages.values())
