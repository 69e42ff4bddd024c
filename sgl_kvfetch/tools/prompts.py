"""``kvfetch pin``: keep prompts in a store."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError
from sgl_kvfetch.log import printable
from sgl_kvfetch.prompts import Prompt, Tokens, page_hashes, read_prompts, tokenise
from sgl_kvfetch.stores import PINS, AdminStore, Pin
from sgl_kvfetch.stores.notes import MAX_PIN_PAGES, get_pin, put_pin
from sgl_kvfetch.stores.upkeep import pages_stored
from sgl_kvfetch.tools.target import run_on_store
from sgl_kvfetch.tools.terminal import IndexedAccess, StoreArgument, json_flag, option, show

_LABEL = 60  # characters of a prompt

PromptOption = Annotated[
    str | None, option("TEXT", "A prompt as the server gets it after its chat template, or [1, 2, ...]: tokens.")
]
FileOption = Annotated[
    Path | None,
    option("FILE", 'Prompts: one text, or one per line in JSONL, {"prompt": TEXT} or {"prompt": [1, 2, ...]}.'),
]
TokenizerOption = Annotated[str | None, option("PATH", "Model whose tokenizer texts need; tokens need none.")]
SaltOption = Annotated[str | None, option("SALT", "The cache_salt of the prompts' requests.")]


class PinSummary(Struct, frozen=True):
    name: str
    label: str
    num_pages: int
    page_size: int
    stored_pages: dict[str, int]  # by namespace


def pin(
    store: StoreArgument,
    access: IndexedAccess,
    prompt: PromptOption = None,
    file: FileOption = None,
    model: TokenizerOption = None,
    page_size: Annotated[int | None, option("TOKENS", "SGLang's --page-size.", min=1)] = None,
    cache_salt: SaltOption = None,
    remove: Annotated[
        list[str] | None, option("NAME", "Remove a pin, by its name in the list, instead. Repeatable.")
    ] = None,
    as_json: Annotated[bool, json_flag(list[PinSummary])] = False,
) -> None:
    """Evict prompts' segments last, list such pins, or remove them.

    A pin holds for all segments with one of the prompt's whole pages, of all models and ranks, stored before or later.
    kvfetch serve wants a token with the role `admin`, and refuses a pin if pinned segments would take more than half
    of its capacity. Without --prompt and --file, the command lists the pins and how much of each is stored, with a
    token of any role; with --remove, those that are left. The exit code is 1 if a pin to remove was not there.
    Lifecycle rules of a bucket do not respect pins.

    Examples:

        kvfetch pin http://127.0.0.1:8700 --file system-prompt.txt --model /models/llama --page-size 64

        kvfetch pin http://127.0.0.1:8700

        kvfetch pin http://127.0.0.1:8700 --remove NAME
    """
    if remove and (prompt is not None or file is not None):
        raise ConfigError("give either --remove, or the --prompt or --file to pin")
    new = _pins_of(prompts_of(prompt, file), model, page_size, cache_salt)

    failures: dict[str, str] = {}

    async def change(store: AdminStore) -> list[PinSummary]:
        for name in remove or ():
            if not await store.delete_note(PINS, name):
                failures[name] = "there was no such pin"
        for one in new:
            await put_pin(store, one)
        names = [one.name for one in new] or sorted(info.name for info in await store.notes(PINS))
        kept = [kept for name in names if (kept := await get_pin(store, name)) is not None]
        return [
            PinSummary(k.name, k.label, len(k.page_hashes), k.page_size, await pages_stored(store, k.page_hashes))
            for k in kept
        ]

    found = run_on_store(store, access, change)
    lines = (
        f"{one.name}  {printable(one.label)}\n"
        f"  {one.num_pages} pages of {one.page_size} tokens; {_stored_text(one.stored_pages)}"
        for one in found
    )
    show(found, as_json, lines if found else ["no pins"], failures)


def prompts_of(prompt: str | None, file: Path | None, *, required: bool = False) -> list[Prompt]:
    """Return the prompts that the options name. Raises ConfigError, also for none if they are ``required``."""
    if prompt is not None and file is not None:
        raise ConfigError("give either --prompt or --file, not both")
    if file is not None:
        return read_prompts(file)
    if prompt is None:
        if required:
            raise ConfigError("expected --prompt or --file")
        return []
    if prompt.startswith("["):
        with contextlib.suppress(*DECODE_ERRORS):
            return [msgspec.json.decode(prompt, type=Tokens)]
    return [prompt]


def tokens_of(prompts: Sequence[Prompt], model: str | None) -> list[Tokens]:
    """Tokenise prompts that are texts. Raises ConfigError."""
    if model is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("texts need --model, whose tokenizer turns them into tokens")
    return tokenise(model or "", prompts)


def _pins_of(prompts: Sequence[Prompt], model: str | None, page_size: int | None, cache_salt: str | None) -> list[Pin]:
    """Make a pin of each prompt. Raises ConfigError."""
    if prompts and page_size is None:
        raise ConfigError("a prompt needs --page-size, SGLang's")
    pins = []
    for given, tokens in zip(prompts, tokens_of(prompts, model), strict=True):
        assert page_size is not None
        hashes = page_hashes(tokens, page_size, cache_salt)
        if not 1 <= len(hashes) <= MAX_PIN_PAGES:
            raise ConfigError(f"a prompt has {len(tokens)} tokens, which are {len(hashes)} pages of {page_size} tokens")
        begins = str(given).strip()
        called = begins[:_LABEL] + "..." * (len(begins) > _LABEL)
        pins.append(Pin(called, page_size, b"".join(hashes)))
    return pins


def _stored_text(stored_pages: Mapping[str, int]) -> str:
    """Format the result of ``pages_stored``."""
    found = ", ".join(f"{pages} in {namespace}" for namespace, pages in stored_pages.items())
    return f"stored: {found or 'none'}"
