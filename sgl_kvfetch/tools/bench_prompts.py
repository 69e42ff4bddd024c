"""Reads or makes the prompts of ``kvfetch bench`` and ``kvfetch compare``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError
from sgl_kvfetch.prompts import Prompt, Tokens, decode_lines
from sgl_kvfetch.user_files import read_text

_EXPECTED = "an object with 'prompt' (a text or a list of tokens), or with 'messages' or 'conversations'"


@dataclass(frozen=True)
class Group:
    """Prompts that are reported together."""

    name: str
    prompts: list[Tokens]


class _Message(Struct):
    """A message as OpenAI's clients write it (``role``, ``content``), or as ShareGPT has it (``from``, ``value``)."""

    role: str = ""
    content: str = ""
    sender: str = msgspec.field(name="from", default="")
    value: str = ""

    @property
    def is_answer(self) -> bool:
        return (self.role or self.sender) in ("assistant", "gpt", "chatgpt", "bing", "bard", "model")

    @property
    def text(self) -> str:
        return self.content or self.value


class _Line(Struct):
    prompt: Prompt | None = None
    messages: list[_Message] | None = None
    conversations: list[_Message] | None = None


def library_text() -> str:
    """Return 460,000 characters of technical English, which every Python has: its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def cut_prompts(tokens: Tokens, lengths: Sequence[int], count: int) -> list[Group]:
    """Cut ``count`` prompts of each length from one text, whose beginning follows its end."""
    groups, start = [], 0
    for length in lengths:
        prompts = []
        for _ in range(count):
            prompts.append([tokens[(start + place) % len(tokens)] for place in range(length)])
            start += length
        groups.append(Group(f"{length:,} tokens", prompts))
    return groups


def longest_prompt(info: Mapping[str, Any], num_new_tokens: int) -> int:
    """Return how many tokens a prompt may have, by an SGLang server's ``/server_info``."""
    limits = [info.get(key) for key in ("context_length", "max_req_input_len", "max_total_num_tokens")]
    return min((limit for limit in limits if isinstance(limit, int)), default=1 << 62) - num_new_tokens - 1


async def make_groups(
    file: Path | None, lengths: Sequence[int], count: int, longest: int, tokenise: Callable[[str], Awaitable[Tokens]]
) -> tuple[list[Group], int]:
    """Return the prompts of a file, or else of these lengths, and how many of the file are longer than ``longest``
    tokens, which the server takes. ``count``: of each length, or at most of the file. Raises ConfigError."""
    if file is None:
        if max(lengths) > longest:
            raise ConfigError(f"--lengths: {max(lengths)} tokens are too long: the server takes up to {longest}")
        return cut_prompts(await tokenise(library_text()), lengths, count), 0
    groups, num_skipped = [], 0
    for name, prompts in read_conversations(file, count):
        tokens = [p if isinstance(p, list) else await tokenise(p) for p in prompts]
        fitting = [prompt for prompt in tokens if 0 < len(prompt) <= longest]
        num_skipped += len(tokens) - len(fitting)
        if fitting:
            groups.append(Group(name, fitting))
    if not groups:
        raise ConfigError(f"{file}: all prompts are longer than the {longest} tokens that the server takes")
    return groups, num_skipped


def parse_lengths(text: str) -> list[int]:
    """Read ``--lengths``. Raises ConfigError."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ConfigError(f"--lengths {text!r}: expected numbers of tokens, such as 1024,4096")
    return [int(part) for part in text.split(",")]


def read_conversations(file: Path, count: int) -> list[tuple[str, list[Prompt]]]:
    """Read at most ``count`` prompts or conversations. Return names of groups, with the prompts of each.

    ``.json`` is a list of objects, ``.jsonl`` has one a line; any other file is one prompt. Each turn of a conversation
    is a prompt, with all that was said before it, and a group has the prompts of equal turns. Raises ConfigError.
    """
    groups: dict[str, list[Prompt]] = {}
    for line in _lines(file)[:count]:
        messages = line.messages or line.conversations
        if line.prompt is not None:
            groups.setdefault("prompts", []).append(line.prompt)
        for turn, prompt in enumerate(_turns(messages or ()), 1):
            groups.setdefault(f"turn {turn}", []).append(prompt)
    if not groups:
        raise ConfigError(f"{file} has no prompts: expected {_EXPECTED}")
    return list(groups.items())


def _lines(file: Path) -> list[_Line]:
    content = read_text(file, "the file")
    if file.suffix not in (".json", ".jsonl"):
        return [_Line(prompt=content)] if content.strip() else []
    if file.suffix == ".json":
        try:
            return msgspec.json.decode(content, type=list[_Line])
        except DECODE_ERRORS as e:
            raise ConfigError(f"{file}: expected a list, each of it {_EXPECTED}: {e}") from e
    return list(decode_lines(file, content, _Line, _EXPECTED))


def _turns(messages: Sequence[_Message]) -> Iterator[str]:
    """Yield what the model was asked at each of its answers: all messages before, without a chat template."""
    said: list[str] = []
    is_asked = False
    for message in messages:
        if message.is_answer and is_asked:
            yield "\n".join(said)
        is_asked = not message.is_answer
        said.append(message.text)
    if is_asked:
        yield "\n".join(said)
