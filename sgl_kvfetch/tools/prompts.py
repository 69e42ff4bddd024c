"""What commands about prompts share: their options, and what is stored of a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import Prompt, Tokens, page_hashes, read_prompts, tokenise
from sgl_kvfetch.stores import MAX_LABEL, MAX_PIN_PAGES, Pin, Store, pages_stored
from sgl_kvfetch.tools.options import print_json

_LABEL = 60  # characters of a prompt

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory."
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="A prompt as the server gets it after its chat template, or [1, 2, ...]: tokens."
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Prompts: one in a text file, or one a line in JSONL, {"prompt": TEXT} or {"prompt": [1, 2, ...]}.',
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Model whose tokenizer texts need; tokens need none.")
]
PageSizeOption = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="SGLang's --page-size.")]
SaltOption = Annotated[str | None, typer.Option(metavar="SALT", help="The cache_salt of the prompts' requests.")]


class StoredPrompt(Struct, frozen=True):
    """What a store has of a prompt."""

    num_tokens: int
    num_pages: int  # whole pages
    stored_pages: dict[str, int]  # by namespace

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, {self.num_pages} pages; {stored_text(self.stored_pages)}"


def prompts_of(prompt: str | None, file: Path | None) -> list[Prompt]:
    """Return the prompts that the options name; none without them. Raises ConfigError."""
    if prompt is not None and file is not None:
        raise ConfigError("give either --prompt or --file, not both")
    if file is not None:
        return read_prompts(file)
    if prompt is None:
        return []
    if prompt.startswith("["):
        with contextlib.suppress(msgspec.DecodeError):
            return [msgspec.json.decode(prompt, type=Tokens)]
    return [prompt]


def pins_of(
    prompt: str | None,
    file: Path | None,
    model: str | None,
    page_size: int | None,
    cache_salt: str | None,
    label: str | None,
) -> list[Pin]:
    """Return pins of the prompts that the options name; none without them. Raises ConfigError."""
    prompts = prompts_of(prompt, file)
    if not prompts:
        return []
    if page_size is None:
        raise ConfigError("a prompt needs --page-size, SGLang's")
    pins = []
    for given, tokens in zip(prompts, tokens_of(prompts, model), strict=True):
        hashes = page_hashes(tokens, page_size, cache_salt)
        if not 1 <= len(hashes) <= MAX_PIN_PAGES:
            raise ConfigError(f"a prompt has {len(tokens)} tokens, which are {len(hashes)} pages of {page_size} tokens")
        begins = str(given).strip()
        called = label if label is not None else begins[:_LABEL] + "..." * (len(begins) > _LABEL)
        pins.append(Pin(called[:MAX_LABEL], page_size, b"".join(hashes)))
    return pins


def tokens_of(prompts: Sequence[Prompt], model: str | None) -> list[Tokens]:
    """Raises ConfigError."""
    if model is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("texts need --model, whose tokenizer turns them into tokens")
    return tokenise(model or "", prompts)


def stored_text(stored_pages: Mapping[str, int]) -> str:
    """Return what ``pages_stored`` found, for people."""
    found = ", ".join(f"{pages} in {namespace}" for namespace, pages in stored_pages.items())
    return f"stored: {found or 'none'}"


async def stored_prompt(store: Store, tokens: Sequence[int], page_size: int, cache_salt: str | None) -> StoredPrompt:
    """Raises StoreError."""
    hashes = page_hashes(tokens, page_size, cache_salt)
    return StoredPrompt(len(tokens), len(hashes), await pages_stored(store, hashes))


def print_stored(prompts: Sequence[StoredPrompt], as_json: bool) -> None:
    if as_json:
        print_json(prompts)
        return
    for number, prompt in enumerate(prompts):
        typer.echo(f"prompt {number}: {prompt}")
