"""Makes conversations of token ids from a file: ShareGPT, prompts as JSON lines, or plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from sgl_kvfetch.errors import ConfigError

Conversation = tuple[tuple[int, ...], ...]  # the user's ids, by turn
Encode = Callable[[str], list[int]]
_MAX_UNKNOWN_SHARE = 0.5
_SAMPLE_CHARS = 20_000
_CHARS_A_TOKEN = 40  # more than any text has: a megabyte for a few conversations would take seconds to tokenise


class _Message(msgspec.Struct, rename={"role": "from", "text": "value"}):
    role: Literal["human", "user", "gpt", "chatgpt", "assistant", "bing", "bard", "model", "system"]
    text: str


class _Dialogue(msgspec.Struct):
    conversations: list[_Message]


class _Prompt(msgspec.Struct):
    prompt: str


@dataclass(frozen=True)
class Dataset:
    """``dialogues`` holds the user's messages of each conversation, or texts, of one message each, to be cut."""

    kind: Literal["sharegpt", "prompts", "text"]
    dialogues: list[list[str]]


def read_dataset(path: Path) -> Dataset:
    """Read a file. Its suffix tells its kind: ``.json`` is a list of ShareGPT conversations, ``.jsonl`` has one object
    per line with either ``prompt`` or ``conversations``, any other file is text. Raises ConfigError."""
    try:
        dataset = _parse(path.suffix.lower(), path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as e:
        raise ConfigError(f"dataset {path} cannot be read: {e}") from e
    if not dataset.dialogues:
        raise ConfigError(f"dataset {path} has no user messages")
    return dataset


def _parse(suffix: str, content: bytes) -> Dataset:
    if suffix == ".json":
        return _sharegpt(msgspec.json.decode(content, type=list[_Dialogue]))
    if suffix not in (".jsonl", ".ndjson"):
        text = content.decode()
        return Dataset("text", [[text]] if text.strip() else [])
    if b'"conversations"' in content.lstrip().partition(b"\n")[0]:
        return _sharegpt(msgspec.json.Decoder(_Dialogue).decode_lines(content))
    prompts = msgspec.json.Decoder(_Prompt).decode_lines(content)
    return Dataset("prompts", [[line.prompt] for line in prompts if line.prompt.strip()])


def _sharegpt(dialogues: Sequence[_Dialogue]) -> Dataset:
    return Dataset("sharegpt", [said for dialogue in dialogues if (said := _user_messages(dialogue.conversations))])


def _user_messages(messages: Sequence[_Message]) -> list[str]:
    """Return what the user says between the answers, with system messages. An answer to nothing counts for nothing:
    some ShareGPT conversations begin in the middle."""
    said: list[str] = []
    is_answered = True
    for message in messages:
        if not message.text.strip():
            continue
        if message.role not in ("human", "user", "system"):
            is_answered = True
        elif is_answered:
            said.append(message.text)
            is_answered = False
        else:
            said[-1] += f"\n{message.text}"
    return said


def make_conversations(
    dataset: Dataset, encode: Encode, count: int, turns: int, max_input_tokens: int, max_new_tokens: int
) -> list[Conversation]:
    """Return at most ``count`` conversations of at most ``turns`` turns.

    ``max_input_tokens`` bounds a conversation's last prompt, which repeats all earlier turns, with answers of
    ``max_new_tokens`` each. Raises ConfigError if nothing fits.
    """
    user_tokens = max_input_tokens - (turns - 1) * max_new_tokens
    if user_tokens < turns:
        raise ConfigError(
            f"{turns} turns with answers of {max_new_tokens} tokens do not fit into prompts of {max_input_tokens} "
            "tokens; ask for fewer turns or shorter answers"
        )
    if dataset.kind == "sharegpt":
        tokenised = ([encode(text) for text in said[:turns]] for said in dataset.dialogues[:count])
        return [_turns_that_fit(said, max_input_tokens, max_new_tokens) for said in tokenised]
    texts = [encode(text[: count * user_tokens * _CHARS_A_TOKEN]) for (text,) in dataset.dialogues[:count]]
    # The first piece of each text, then the second of each, and so on, so that conversations share little.
    starts = range(0, max(map(len, texts)), user_tokens)
    pieces = (text[start : start + user_tokens] for start in starts for text in texts)
    usable = (piece for piece in pieces if len(piece) >= turns)
    made = [tuple(tuple(turn.tolist()) for turn in np.array_split(piece, turns)) for piece in islice(usable, count)]
    if not made:
        raise ConfigError(f"the dataset is too short for a conversation of {turns} turns")
    return made


def _turns_that_fit(said: Sequence[list[int]], max_input_tokens: int, max_new_tokens: int) -> Conversation:
    """Return as many turns as fit. A first turn that is too long is truncated."""
    made = [tuple(said[0][:max_input_tokens])]
    used = len(made[0])
    for ids in said[1:]:
        used += max_new_tokens + len(ids)
        if used > max_input_tokens:
            break
        made.append(tuple(ids))
    return tuple(made)


def load_encoder(tokenizer_path: str, dataset: Dataset) -> tuple[Encode, str]:
    """Return a function from text to token ids, and its description for the report. Raises ConfigError.

    It is the model's tokenizer, unless that knows hardly any of the words, as a random model's does. Then each word
    gets one id by its hash, so that repetitions in the text remain in the prompt.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    except (OSError, ValueError) as e:
        said = str(e).strip().partition("\n")[0]
        raise ConfigError(f"no tokenizer at {tokenizer_path!r} ({said})") from e

    def encode(text: str) -> list[int]:
        # A text longer than the model's context is cut later, so the tokenizer's warning would be misleading.
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    sample = encode("\n".join(dataset.dialogues[0])[:_SAMPLE_CHARS])
    if sample.count(tokenizer.unk_token_id) <= _MAX_UNKNOWN_SHARE * len(sample):
        return encode, "the model's tokenizer"
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.all_special_ids]

    def hashed(text: str) -> list[int]:
        return [ids[xxh3_64_intdigest(word.encode()) % len(ids)] for word in text.split()]

    return hashed, "words hashed into the vocabulary, since the model's tokenizer knows hardly any of the dataset's"
