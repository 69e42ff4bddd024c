"""Reads or makes the prompts of ``kvfetch bench`` and ``kvfetch compare``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import Tokens, read_prompts


@dataclass(frozen=True)
class Group:
    """Prompts that are reported together."""

    name: str
    prompts: list[Tokens]


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
    prompts = [p if isinstance(p, list) else await tokenise(p) for p in read_prompts(file)[:count]]
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= longest]
    if not fitting:
        raise ConfigError(f"{file}: all prompts are longer than the {longest} tokens that the server takes")
    return [Group("prompts", fitting)], len(prompts) - len(fitting)


def parse_lengths(text: str) -> list[int]:
    """Read ``--lengths``. Raises ConfigError."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ConfigError(f"--lengths {text!r}: expected numbers of tokens, such as 1024,4096")
    return [int(part) for part in text.split(",")]
