"""Prompts, and the hashes of their pages as SGLang computes them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta, defstruct

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why
from sgl_kvfetch.user_files import read_text

_HUB_TIMEOUT_S = 10.0  # whether it has a model
MAX_TOKEN = (1 << 32) - 1  # SGLang hashes larger ones otherwise; no tokenizer has them

# What a calibration takes unless it is told otherwise: windows of text, each a context and its continuation.
NUM_WINDOWS, CONTEXT_TOKENS, CONTINUATION_TOKENS = 25, 1024, 512

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
        raise ConfigError(f"{file}: {why(e)}") from e


def _read(file: Path, kind: Any, expected: str) -> list[Any]:
    content = read_text(file, "the file")
    if file.suffix != ".jsonl":
        if not content.strip():
            raise ConfigError(f"{file} is empty")
        return [content]
    prompts = [line.prompt for line in _decode_lines(file, content, defstruct("Line", [("prompt", kind)]), expected)]
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def _decode_lines(file: Path, content: str, kind: Any, expected: str) -> Iterator[Any]:
    """Decode the lines of JSONL, but for blank ones. Raises ConfigError, which names the line and what is wrong."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=kind)
            except DECODE_ERRORS as e:
                raise ConfigError(f"{file}:{number}: expected {expected}: {e}") from e


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
    tokenizer = _load_tokenizer(model)
    return [prompt if isinstance(prompt, list) else list(tokenizer(prompt).input_ids) for prompt in prompts]


def text_of(model: str, tokens: Tokens) -> str:
    """Return what the model's tokenizer makes of tokens. Raises ConfigError without one."""
    return str(_load_tokenizer(model).decode(tokens))


def _load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model's folder, or of its name at Hugging Face. Raises ConfigError.

    The hub is asked once whether it has the model: `from_pretrained` tries for a minute, file by file, to find out that
    it has not, or that there is no network.
    """
    try:
        import httpx
        from huggingface_hub import HfApi
        from transformers import AutoTokenizer
    except ImportError as e:
        raise ConfigError(f"texts need transformers, which is not installed: install it, or give tokens ({e})") from e
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as e:
        if Path(model).is_dir():
            raise ConfigError(f"no tokenizer in the folder {model}: {_first_line(e)}") from e
    try:
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, httpx.HTTPError) as e:
        raise ConfigError(
            f"no tokenizer of {model!r}: it is no folder on this machine, and Hugging Face's hub did not give it "
            f"({_first_line(e)}): give the model's folder, or tokens"
        ) from e


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
