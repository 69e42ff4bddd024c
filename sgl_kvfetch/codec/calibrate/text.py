"""Texts of several kinds, cut into windows of tokens that begin as prompts do.

What errors in K and V cost differs by the kind of text: at one step, SmolLM2 loses several times as much on Chinese as
on English. So a calibration takes windows of each kind that the model will meet, and measures each kind by itself.
"""

from __future__ import annotations

import lzma
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts, text_digest

# Texts of nine kinds, for calibrations that are given none. TEXTS.md says where they are from.
DEFAULT_TEXT = Path(__file__).with_name("texts.jsonl.xz")
MOST_KINDS = 64
_NAMED = re.compile(r"(?P<name>[^/=]+)=(?P<rest>.+)", re.DOTALL)
_SHARED = re.compile(r"(?P<file>.+):(?P<share>[0-9.]+(?:e-?[0-9]+)?)", re.DOTALL)
_NAME = re.compile(r"\w[\w .+-]{0,31}")


class _Line(msgspec.Struct, frozen=True):
    """A line of the default text."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Texts of one kind. ``share``: of all windows, from 0 to 1; None for an equal part of what others leave."""

    name: str
    texts: tuple[str, ...]
    share: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a name or a share that cannot be."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"the kind of text {self.name!r}: expected a name of up to 32 letters, digits, spaces, and any of _.+-"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"text {self.name}: its share is {self.share:g}, expected more than 0 and at most 1")


def read_kinds(given: Sequence[str]) -> tuple[list[Kind], str]:
    """Read texts that are given as ``[NAME=]FILE[:SHARE]``, by default the default text. Return their kinds, and a line
    for people that names the files.

    A kind is called like its file if it has no other name. Files of one name are one kind, whose share is the sum of
    theirs. Raises ConfigError, naming what is wrong.
    """
    if not given:
        return _default_kinds(), f"the default text ({text_digest(DEFAULT_TEXT)})"
    kinds: dict[str, Kind] = {}
    described = []
    for each in given:
        named = _NAMED.fullmatch(each)
        rest = named["rest"] if named else each
        shared = _SHARED.fullmatch(rest)
        file, share = (Path(shared["file"]), _share_of(each, shared["share"])) if shared else (Path(rest), None)
        name = named["name"] if named else file.stem
        texts = tuple(read_texts(file))
        if (before := kinds.get(name)) is not None:
            texts = before.texts + texts
            share = share if before.share is None else before.share + (share or 0.0)
        kinds[name] = Kind(name, texts, share)
        described.append(f"{file.name} ({text_digest(file)})")
    return list(kinds.values()), ", ".join(described)


def _share_of(given: str, share: str) -> float:
    try:
        return float(share)
    except ValueError as e:
        raise ConfigError(f"--text {given}: expected [NAME=]FILE[:SHARE], with a number such as 0.5 as SHARE") from e


def _default_kinds() -> list[Kind]:
    texts: dict[str, list[str]] = {}
    for line in lzma.decompress(DEFAULT_TEXT.read_bytes()).splitlines():
        parsed = msgspec.json.decode(line, type=_Line)
        texts.setdefault(parsed.kind, []).append(parsed.text)
    return [Kind(name, tuple(of_kind)) for name, of_kind in texts.items()]


def windows_of_kinds(
    tokenizer: Any, kinds: Sequence[Kind], num_windows: int, window_tokens: int, part: str
) -> dict[str, list[torch.Tensor]]:
    """Return each kind's windows, as `calibration_windows` cuts them, of this part of each text.

    Kinds have windows by their shares, and at least two each: one to fit and one to measure. Raises ConfigError.
    """
    windows = {}
    for kind, number in zip(kinds, shared_out(kinds, num_windows), strict=True):
        tokens = [part_of(tokenise(tokenizer, text), part) for text in kind.texts]
        try:
            windows[kind.name] = calibration_windows(tokenizer, tokens, number, window_tokens)
        except ConfigError as e:
            raise ConfigError(f"text {kind.name}: {e}") from e
    return windows


def shared_out(kinds: Sequence[Kind], num_windows: int) -> list[int]:
    """Return how many windows each kind has of ``num_windows``. Raises ConfigError for shares that do not add up to 1,
    or too few windows."""
    if len(kinds) > MOST_KINDS:
        raise ConfigError(f"there are {len(kinds)} kinds of text, expected {MOST_KINDS} at most: give several one name")
    given = sum(kind.share or 0.0 for kind in kinds)
    num_open = sum(kind.share is None for kind in kinds)
    if given > 1 + 1e-6 or (not num_open and given < 1 - 1e-6) or (num_open and given > 1 - 1e-6):
        left = " and leave some for texts without one" if num_open else ""
        raise ConfigError(f"the shares of texts add up to {given:g}: expected 1 in all{left}")
    if num_windows < 2 * len(kinds):
        raise ConfigError(
            f"{len(kinds)} kinds of text need {2 * len(kinds)} windows or more, one of each to fit and one to measure: "
            f"expected --windows {2 * len(kinds)} or more, found {num_windows}"
        )
    wanted = [num_windows * (kind.share or (1 - given) / max(1, num_open)) for kind in kinds]
    numbers = [max(2, math.floor(each + 1e-6)) for each in wanted]
    while (wrong := num_windows - sum(numbers)) != 0:  # who is furthest from its share gives, or gets, one
        off = [each - number for each, number in zip(wanted, numbers, strict=True)]
        if wrong > 0:
            numbers[off.index(max(off))] += 1
        else:
            least = min(o for o, number in zip(off, numbers, strict=True) if number > 2)
            numbers[next(i for i, o in enumerate(off) if o == least and numbers[i] > 2)] -= 1
    return numbers


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
        longest = f"a window is of one prompt, and the longest of {len(texts)} has {max(map(len, texts))} tokens; "
        raise ConfigError(
            f"the text has {len(windows)} windows of {window_tokens} tokens, expected {num_windows} or more; "
            f"{longest if len(texts) > 1 else ''}"
            "give more text, or ask for fewer (--windows) or shorter ones (--context, --continuation)"
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
