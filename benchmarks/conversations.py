"""Conversations in token ids, cut to what the server can take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.dataset import Dataset, Exchange
from benchmarks.tokens import Tokens


@dataclass(frozen=True)
class Turn:
    """``answer_ids`` is the answer that later prompts repeat; None for what the model answers."""

    user_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Cut:
    """How to cut. An answer of the model is ``max_new_tokens`` long, since the end token is ignored.

    ``max_input_tokens`` bounds a conversation's last prompt, which holds all before it.
    """

    num_conversations: int
    turns: int
    max_input_tokens: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.user_tokens < self.turns:
            raise ValueError(
                f"{self.turns} turns with answers of {self.max_new_tokens} tokens do not fit into prompts of "
                f"{self.max_input_tokens} tokens; ask for fewer turns or shorter answers"
            )

    @property
    def user_tokens(self) -> int:
        """What is left for the user in a conversation of ``turns`` turns with the model's answers between."""
        return self.max_input_tokens - (self.turns - 1) * self.max_new_tokens


def make_conversations(dataset: Dataset, tokens: Tokens, cut: Cut, *, dataset_answers: bool) -> list[Conversation]:
    """The first ``num_conversations`` of the file, or all if it has fewer. ``dataset_answers``: the history has the
    file's answers, not the model's."""
    if dataset.kind == "sharegpt":
        some = dataset.dialogues[: cut.num_conversations]
        return [_from_dialogue(dialogue, tokens, cut, dataset_answers) for dialogue in some]
    assert not dataset_answers, f"a {dataset.kind} file has no answers"
    needed = cut.num_conversations * cut.user_tokens
    # Text is cut off before it is tokenised, generously: a megabyte for a few conversations would take seconds.
    texts = (tokens.encode(text[: needed * 40]) for text in dataset.texts[: cut.num_conversations])
    return list(_from_texts(list(texts), cut))


def _from_dialogue(dialogue: tuple[Exchange, ...], tokens: Tokens, cut: Cut, dataset_answers: bool) -> Conversation:
    """As many turns as fit. A first turn that is too long is cut off."""
    turns: list[Turn] = []
    used = 0
    for exchange in dialogue[: cut.turns]:
        user_ids = tuple(tokens.encode(exchange.user))
        if used + len(user_ids) > cut.max_input_tokens:
            if turns:
                break
            user_ids = user_ids[: cut.max_input_tokens]
        answer_ids = tuple(tokens.encode(exchange.answer or "")) if dataset_answers else None
        turns.append(Turn(user_ids, answer_ids))
        used += len(user_ids) + (cut.max_new_tokens if answer_ids is None else len(answer_ids))
    return Conversation(tuple(turns))


def _from_texts(texts: list[list[int]], cut: Cut) -> Iterator[Conversation]:
    """The first piece of each text, then the second of each, and so on: conversations differ as far as they can."""
    num_left = cut.num_conversations
    piece_idx = 0
    while num_left:
        start = piece_idx * cut.user_tokens
        pieces = [text[start : start + cut.user_tokens] for text in texts]
        usable = [piece for piece in pieces if len(piece) >= cut.turns][:num_left]
        if not usable:
            return
        for piece in usable:
            yield Conversation(tuple(_equal_turns(piece, cut.turns)))
        num_left -= len(usable)
        piece_idx += 1


def _equal_turns(piece: list[int], num_turns: int) -> Iterator[Turn]:
    bounds = [len(piece) * i // num_turns for i in range(num_turns + 1)]
    for start, end in itertools.pairwise(bounds):
        yield Turn(tuple(piece[start:end]))
