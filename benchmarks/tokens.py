"""Text to token ids, by the model's tokenizer or, where that knows hardly any word, by hashing; how far ids agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

_MAX_UNKNOWN_SHARE = 0.5


class TokenizerError(ValueError):
    """There is no tokenizer to be had."""


class Tokens(Protocol):
    """``description`` goes into the report."""

    description: str

    def encode(self, text: str) -> list[int]: ...


class TokenizerTokens:
    """The ids that the model's tokenizer gives, without special tokens."""

    description = "the model's tokenizer"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        # A text longer than the model's context is cut later, so the tokenizer's warning would mislead.
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


class HashedWords:
    """One id a word: equal words get equal ids, so what repeats in the text repeats in the prompt."""

    description = "words hashed into the vocabulary, since the model's tokenizer knows hardly any of the dataset's"

    def __init__(self, vocab_size: int, special_ids: set[int]) -> None:
        self._ids = [i for i in range(vocab_size) if i not in special_ids]
        assert self._ids, "a vocabulary of special tokens alone"

    def encode(self, text: str) -> list[int]:
        return [self._ids[xxh3_64_intdigest(word.encode()) % len(self._ids)] for word in text.split()]


def load_tokens(tokenizer_path: str, sample: str) -> Tokens:
    """The tokenizer at that path, or hashing if it makes most of the sample's tokens unknown ones.

    Raises TokenizerError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    except (OSError, ValueError) as e:
        said = str(e).strip().partition("\n")[0]
        raise TokenizerError(f"no tokenizer at {tokenizer_path!r} ({said}); name one with --tokenizer") from e
    return choose_tokens(tokenizer, sample)


def choose_tokens(tokenizer: Any, sample: str) -> Tokens:
    known = TokenizerTokens(tokenizer)
    ids = known.encode(sample)
    unknown_id = tokenizer.unk_token_id
    if ids and (unknown_id is None or ids.count(unknown_id) <= _MAX_UNKNOWN_SHARE * len(ids)):
        return known
    return HashedWords(tokenizer.vocab_size, set(tokenizer.all_special_ids))


def num_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
