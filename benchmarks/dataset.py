"""Reads files with user messages: ShareGPT conversations, prompts as JSON lines, or plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

USER_ROLES = frozenset({"human", "user"})
ANSWER_ROLES = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard", "model"})
SYSTEM_ROLES = frozenset({"system"})

Kind = Literal["sharegpt", "prompts", "text"]


class DatasetError(ValueError):
    """The file is invalid. The message says where, what was found and what is allowed."""


@dataclass(frozen=True)
class Exchange:
    """A user's message, and the file's answer to it, if any."""

    user: str
    answer: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A file's content: dialogues with their turns (``sharegpt``), or texts to be cut into turns (the others)."""

    path: Path
    kind: Kind
    dialogues: tuple[tuple[Exchange, ...], ...] = ()
    texts: tuple[str, ...] = ()

    def sample(self, max_chars: int = 20_000) -> str:
        """Return some of its text, to test a tokenizer with."""
        said = (exchange.user for dialogue in self.dialogues for exchange in dialogue)
        sample = ""
        for text in (*self.texts, *said):
            if len(sample) >= max_chars:
                break
            sample += text[:max_chars] + "\n"
        return sample[:max_chars]


def read_dataset(path: Path) -> Dataset:
    """Read a file. Its suffix tells its kind: ``.json`` is a list of ShareGPT conversations, ``.jsonl`` has one object
    per line with either ``prompt`` or ``conversations``, any other file is text.

    Raises DatasetError.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DatasetError(f"dataset {path} cannot be read: {e}") from e
    match path.suffix.lower():
        case ".json":
            dataset = _from_json(path, content)
        case ".jsonl" | ".ndjson":
            dataset = _from_json_lines(path, content)
        case _:
            dataset = Dataset(path, "text", texts=(content,) if content.strip() else ())
    if not dataset.dialogues and not dataset.texts:
        raise DatasetError(f"dataset {path} has no user messages")
    return dataset


def _from_json(path: Path, content: str) -> Dataset:
    try:
        entries = json.loads(content)
    except json.JSONDecodeError as e:
        raise DatasetError(f"dataset {path} is not JSON: {e}; a file with one object per line is named .jsonl") from e
    if not isinstance(entries, list):
        raise DatasetError(f"dataset {path}: expected a list of conversations, found {_type_name(entries)}")
    return _sharegpt(path, ((f"entry {i}", entry) for i, entry in enumerate(entries)))


def _from_json_lines(path: Path, content: str) -> Dataset:
    entries: list[tuple[str, Any]] = []
    # Not splitlines(): a JSON string may contain Unicode's other line separators.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as e:
            raise DatasetError(f"dataset {path}, line {number}: not JSON: {e}") from e
    if entries and isinstance(entries[0][1], dict) and "conversations" in entries[0][1]:
        return _sharegpt(path, iter(entries))
    prompts = (_prompt(path, where, entry) for where, entry in entries)
    return Dataset(path, "prompts", texts=tuple(prompt for prompt in prompts if prompt.strip()))


def _prompt(path: Path, where: str, entry: Any) -> str:
    if not isinstance(entry, dict):
        raise DatasetError(f"dataset {path}, {where}: expected an object, found {_type_name(entry)}")
    if "prompt" not in entry:
        raise DatasetError(f"dataset {path}, {where}: expected 'prompt' or 'conversations', found {sorted(entry)}")
    if not isinstance(entry["prompt"], str):
        raise DatasetError(f"dataset {path}, {where}: 'prompt' is {_type_name(entry['prompt'])}, expected a string")
    return entry["prompt"]


def _sharegpt(path: Path, entries: Iterator[tuple[str, Any]]) -> Dataset:
    dialogues = (tuple(_exchanges(_messages(path, where, entry))) for where, entry in entries)
    return Dataset(path, "sharegpt", dialogues=tuple(dialogue for dialogue in dialogues if dialogue))


def _messages(path: Path, where: str, entry: Any) -> Iterator[tuple[str, str]]:
    """Yield a conversation's validated (role, text) pairs."""
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise DatasetError(f"dataset {path}, {where}: expected an object with a list 'conversations'")
    for i, message in enumerate(messages):
        role, text = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(text, str):
            raise DatasetError(f"dataset {path}, {where}, message {i}: expected strings 'from' and 'value'")
        if role not in USER_ROLES | ANSWER_ROLES | SYSTEM_ROLES:
            known = ", ".join(sorted(USER_ROLES | ANSWER_ROLES | SYSTEM_ROLES))
            raise DatasetError(f"dataset {path}, {where}, message {i}: 'from' is {role!r}; allowed are {known}")
        yield role, text


def _exchanges(messages: Iterator[tuple[str, str]]) -> Iterator[Exchange]:
    """Pair user messages with the answers that follow. A system message is joined with the next user message. Answers
    without a user message are left out: some ShareGPT conversations begin in the middle."""
    said: list[str] = []
    answer: list[str] = []
    for role, text in messages:
        if not text.strip():
            continue
        if role in ANSWER_ROLES:
            if said:
                answer.append(text)
            continue
        if answer:
            yield Exchange("\n".join(said), "\n".join(answer))
            said, answer = [], []
        said.append(text)
    if said:
        yield Exchange("\n".join(said), "\n".join(answer) or None)


def _type_name(value: Any) -> str:
    return "null" if value is None else f"a JSON {type(value).__name__}"
