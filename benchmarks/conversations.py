"""Makes conversations of token ids, cut to lengths that the server accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.dataset import Dataset, Exchange
from benchmarks.tokens import Tokens


@dataclass(frozen=True)
class Turn:
    """``answer_ids`` is the answer that later prompts repeat; None for the model's own answer."""

    user_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Cut:
    """The limits. The model's answers have ``max_new_tokens`` tokens, since the end token is ignored.

    ``max_input_tokens`` bounds a conversation's last prompt, which includes all earlier turns.
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
        """Return the user's share of ``max_input_tokens``, without the model's answers between ``turns`` turns."""
        return self.max_input_tokens - (self.turns - 1) * self.max_new_tokens


def make_conversations(dataset: Dataset, tokens: Tokens, cut: Cut, *, dataset_answers: bool) -> list[Conversation]:
    """Return the file's first ``num_conversations`` conversations, or all if it has fewer. ``dataset_answers``: the
    history has the file's answers, not the model's."""
    if dataset.kind == "sharegpt":
        some = dataset.dialogues[: cut.num_conversations]
        return [_from_dialogue(dialogue, tokens, cut, dataset_answers) for dialogue in some]
    assert not dataset_answers, f"a {dataset.kind} file has no answers"
    needed = cut.num_conversations * cut.user_tokens
    # Cut the text generously before tokenising: a megabyte for a few conversations would take seconds.
    texts = (tokens.encode(text[: needed * 40]) for text in dataset.texts[: cut.num_conversations])
    return list(_from_texts(list(texts), cut))


def _from_dialogue(dialogue: tuple[Exchange, ...], tokens: Tokens, cut: Cut, dataset_answers: bool) -> Conversation:
    """Return as many turns as fit. A first turn that is too long is truncated."""
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
    """Yield the first piece of each text, then the second of each, and so on, so that conversations share little."""
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
