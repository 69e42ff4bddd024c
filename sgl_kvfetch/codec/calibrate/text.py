"""Cut texts into windows of tokens that begin as prompts do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_kvfetch.errors import ConfigError


def prompt_start(tokenizer: Any) -> torch.Tensor:
    """Return the tokens that a tokenizer puts before every text, ``(tokens,)`` int64: mostly a BOS token, often none.

    Attention sinks are at these tokens. The KV cache of a window without them differs from that of any real prompt.
    """
    whole, bare = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    found = (first for first in range(len(whole)) if whole[first : first + len(bare)] == bare)
    return torch.tensor(whole[: next(found, 0)], dtype=torch.long)


def tokenise(tokenizer: Any, text: str) -> torch.Tensor:
    """Return a text's tokens, ``(tokens,)`` int64, without ``prompt_start``, even if the text itself contains it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return without_prompt_start(tokenizer, torch.tensor(ids, dtype=torch.long))


def without_prompt_start(tokenizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return tokens, ``(tokens,)`` int64, without ``prompt_start``, if they begin so."""
    start, ids = prompt_start(tokenizer), ids.long()
    return ids[len(start) :] if torch.equal(ids[: len(start)], start) else ids


def cut_windows(
    texts: Sequence[torch.Tensor], num_windows: int, window_tokens: int, start: torch.Tensor
) -> list[torch.Tensor]:
    """Cut ``num_windows`` windows of ``(window_tokens,)``, spread evenly over the texts' tokens.

    Each begins with ``start`` (see ``prompt_start``), as a prompt does. The rest is a piece of a text; pieces do not
    overlap. Raises ConfigError, naming the number found, if there are too few.
    """
    num_own = window_tokens - len(start)
    if num_own < 1:
        raise ConfigError(f"windows of {window_tokens} tokens hold only the start of every prompt: expected more")
    windows = [
        torch.cat((start, text[first : first + num_own]))
        for text in texts
        for first in range(0, len(text) - num_own + 1, num_own)
    ]
    if len(windows) < num_windows:
        raise ConfigError(
            f"the text has {len(windows)} windows of {window_tokens} tokens, expected {num_windows} or more; "
            "give more text, or ask for fewer or shorter windows"
        )
    return [windows[i * len(windows) // num_windows] for i in range(num_windows)]


def calibration_windows(
    tokenizer: Any, texts: Sequence[torch.Tensor], num_windows: int, window_tokens: int
) -> list[torch.Tensor]:
    """Return windows that begin as prompts do. Every other one is a user's message in the model's chat template, if the
    model has one. Raises ConfigError as ``cut_windows`` does."""
    start, chat = prompt_start(tokenizer), chat_start(tokenizer)
    plain = cut_windows(texts, num_windows, window_tokens, start)
    if not len(chat) or len(chat) > window_tokens // 4:
        return plain
    return [
        torch.cat((chat, window[len(start) :]))[:window_tokens] if i % 2 else window for i, window in enumerate(plain)
    ]


def chat_start(tokenizer: Any) -> torch.Tensor:
    """Return the tokens that the chat template, if any, puts before a user's first message, ``(tokens,)`` int64."""
    if not getattr(tokenizer, "chat_template", None):
        return torch.tensor([], dtype=torch.long)
    mark = "\N{SNOWMAN}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = text.partition(mark)
    ids: list[int] = tokenizer(before, add_special_tokens=False).input_ids if found else []
    return torch.tensor(ids, dtype=torch.long)


def part_of(text: torch.Tensor, part: str) -> torch.Tensor:
    """Return a part of a text's tokens, given as fractions ``FROM:TO``. Raises ConfigError."""
    first, end = fractions_of(part)
    return text[int(first * len(text)) : int(end * len(text))]


def fractions_of(part: str) -> tuple[float, float]:
    """Parse ``FROM:TO`` into two numbers. Raises ConfigError."""
    try:
        first, end = map(float, part.split(":"))
    except ValueError:
        first = end = -1.0
    if not 0 <= first < end <= 1:
        raise ConfigError(f"part {part!r}: expected FROM:TO with 0 <= FROM < TO <= 1, such as 0.5:1")
    return first, end
