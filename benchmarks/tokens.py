"""Converts text to token ids, with the model's tokenizer or, if it knows hardly any words, by hashing. Compares ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

_MAX_UNKNOWN_SHARE = 0.5


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded."""


class Tokens(Protocol):
    """``description`` goes into the report."""

    description: str

    def encode(self, text: str) -> list[int]: ...


class TokenizerTokens:
    """Uses the model's tokenizer, without special tokens."""

    description = "the model's tokenizer"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        # A text longer than the model's context is cut later, so the tokenizer's warning would be misleading.
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


class HashedWords:
    """Gives each word one id. Equal words get equal ids, so repetitions in the text remain in the prompt."""

    description = "words hashed into the vocabulary, since the model's tokenizer knows hardly any of the dataset's"

    def __init__(self, vocab_size: int, special_ids: set[int]) -> None:
        self._ids = [i for i in range(vocab_size) if i not in special_ids]
        assert self._ids, "the vocabulary has only special tokens"

    def encode(self, text: str) -> list[int]:
        return [self._ids[xxh3_64_intdigest(word.encode()) % len(self._ids)] for word in text.split()]


def load_tokens(tokenizer_path: str, sample: str) -> Tokens:
    """Load the tokenizer at that path. Return hashing instead if most of the sample's tokens are unknown to it.

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
    """Return how many leading tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
