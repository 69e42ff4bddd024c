"""Prompts, and the hashes of their pages as SGLang computes them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.user_files import read_text

MAX_TOKEN = (1 << 32) - 1  # SGLang hashes larger ones otherwise; no tokenizer has them

Tokens = list[Annotated[int, Meta(ge=0, le=MAX_TOKEN)]]
Prompt = str | Tokens


def read_texts(file: Path) -> list[str]:
    """Return the texts of a file: one text for plain text, one a line for JSONL with a field ``prompt``.

    Raises ConfigError naming the file, the line, and what is wrong.
    """
    return _read(file, str, "an object with a string 'prompt'")


def read_prompts(file: Path) -> list[Prompt]:
    """Like ``read_texts``, but ``prompt`` may also be a list of token numbers."""
    return _read(file, Prompt, "an object with a 'prompt', a string or a list of tokens")


def text_digest(file: Path) -> str:
    """Return 16 hex digits that tell the contents of text files apart. Raises ConfigError."""
    try:
        return xxhash.xxh3_64_hexdigest(file.read_bytes())
    except OSError as e:
        raise ConfigError(f"{file}: {e}") from e


def _read(file: Path, kind: Any, expected: str) -> list[Any]:
    line_type: Any = msgspec.defstruct("Line", [("prompt", kind)])
    content = read_text(file, "the file")
    if file.suffix != ".jsonl":
        if not content.strip():
            raise ConfigError(f"{file} is empty")
        return [content]
    prompts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(msgspec.json.decode(line, type=line_type).prompt)
        except msgspec.DecodeError as e:
            raise ConfigError(f"{file}:{number}: expected {expected}: {e}") from e
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def page_hashes(tokens: Sequence[int], page_size: int, cache_salt: str | None = None) -> list[bytes]:
    """Return the chained hashes of a prompt's whole pages, equal to SGLang's, without importing SGLang."""
    last = b""
    if cache_salt:
        salt = cache_salt.encode()
        seed = b"sglang-cache-namespace-v1\0\1" + len(salt).to_bytes(8, "little") + salt  # and no extra_key
        last = hashlib.sha256(seed).digest()
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = array("I", tokens[start : start + page_size])
        last = hashlib.sha256(last + page.tobytes()).digest()
        hashes.append(last)
    return hashes


def tokenise(model: str, prompts: Sequence[Prompt]) -> list[Tokens]:
    """Return the tokens of prompts, with those that the model's tokenizer adds. Raises ConfigError without one."""
    if all(isinstance(prompt, list) for prompt in prompts):
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise ConfigError(f"texts need transformers, which is not installed; give tokens instead ({e})") from e
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no tokenizer at {model!r}: {str(e).splitlines()[0]}") from e
    return [prompt if isinstance(prompt, list) else list(tokenizer(prompt).input_ids) for prompt in prompts]
