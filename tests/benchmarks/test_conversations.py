from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.conversations import Conversation, Cut, Turn, make_conversations
from benchmarks.dataset import Dataset, Exchange
from benchmarks.tokens import HashedWords, TokenizerError, TokenizerTokens, choose_tokens, load_tokens


class Numbers:
    """Token ids, written out."""

    description = "numbers"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def _numbers(start: int, end: int) -> str:
    return " ".join(map(str, range(start, end)))


def _longest_prompt(conversation: Conversation, max_new_tokens: int) -> int:
    answers = sum(
        max_new_tokens if turn.answer_ids is None else len(turn.answer_ids) for turn in conversation.turns[:-1]
    )
    return answers + sum(len(turn.user_ids) for turn in conversation.turns)


def test_texts_are_cut_into_pieces_and_turns() -> None:
    dataset = Dataset(Path("x"), "prompts", texts=(_numbers(0, 50), _numbers(100, 120)))
    cut = Cut(num_conversations=4, turns=2, max_input_tokens=24, max_new_tokens=4)
    conversations = make_conversations(dataset, Numbers(), cut, dataset_answers=False)
    # The first piece of both texts before the second of the first; what is left, 10 tokens, makes a short one.
    assert [[turn.user_ids[0] for turn in conversation.turns] for conversation in conversations] == [
        [0, 10],
        [100, 110],
        [20, 30],
        [40, 45],
    ]
    assert [_longest_prompt(conversation, 4) for conversation in conversations] == [24, 24, 24, 14]
    assert conversations == make_conversations(dataset, Numbers(), cut, dataset_answers=False)


def test_one_long_text_gives_consecutive_conversations_and_no_more_than_it_has() -> None:
    dataset = Dataset(Path("x"), "text", texts=(_numbers(0, 21),))
    cut = Cut(num_conversations=9, turns=2, max_input_tokens=10, max_new_tokens=0 + 2)
    conversations = make_conversations(dataset, Numbers(), cut, dataset_answers=False)
    assert [conversation.turns[0].user_ids[0] for conversation in conversations] == [0, 8, 16]


@pytest.mark.parametrize("dataset_answers", [False, True])
def test_dialogues_keep_the_turns_that_fit(dataset_answers: bool) -> None:
    dialogue = tuple(Exchange(_numbers(i, i + 6), _numbers(i + 6, i + 10)) for i in range(0, 50, 10))
    dataset = Dataset(Path("x"), "sharegpt", dialogues=(dialogue, (Exchange(_numbers(0, 99)),)))
    cut = Cut(num_conversations=2, turns=4, max_input_tokens=30, max_new_tokens=4)
    first, long = make_conversations(dataset, Numbers(), cut, dataset_answers=dataset_answers)
    assert len(first.turns) == 3
    assert first.turns[1] == Turn(tuple(range(10, 16)), tuple(range(16, 20)) if dataset_answers else None)
    assert _longest_prompt(first, 4) == 26
    assert [len(turn.user_ids) for turn in long.turns] == [30]


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="9 turns with answers of 64 tokens do not fit into prompts of 500 tokens"):
        Cut(num_conversations=1, turns=9, max_input_tokens=500, max_new_tokens=64)


def test_unknown_words_are_hashed_into_the_vocabulary(tiny_llama: Path) -> None:
    tokens = load_tokens(str(tiny_llama), "It was the best of times, it was the worst of times")
    assert isinstance(tokens, HashedWords)
    ids = tokens.encode("it was the best of times, it was the worst of times,")
    assert ids[:3] == ids[6:9]
    assert len(set(ids)) == 7
    assert all(3 <= i < 2048 for i in ids)


def test_known_words_go_through_the_tokenizer(tiny_llama: Path) -> None:
    tokens = choose_tokens(AutoTokenizer.from_pretrained(tiny_llama), "w17 w18 w19 what")
    assert isinstance(tokens, TokenizerTokens)
    assert tokens.encode("w5 w6") == [5, 6]


def test_no_tokenizer_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer at .*--tokenizer"):
        load_tokens(str(tmp_path), "words")
