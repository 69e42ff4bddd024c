from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dataset import DatasetError, Exchange, read_dataset


def _write(directory: Path, name: str, content: Any) -> Path:
    path = directory / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def _said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in messages]}


def test_sharegpt(tmp_path: Path) -> None:
    entries = [
        _said(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Why?")),
        _said(("gpt", "an answer to nothing"), ("user", "A"), ("user", "B"), ("assistant", "C"), ("gpt", "D")),
        _said(("gpt", "nobody asked")),
        _said(("human", " "), ("gpt", "nothing was said")),
    ]
    dataset = read_dataset(_write(tmp_path, "some.json", entries))
    assert dataset.kind == "sharegpt"
    assert dataset.dialogues == (
        (Exchange("Be brief.\nHi", "Hello"), Exchange("Why?", None)),
        (Exchange("A\nB", "C\nD"),),
    )


def test_sharegpt_as_json_lines(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(_said(("human", word), ("gpt", "Yes"))) for word in ("one", "two"))
    dataset = read_dataset(_write(tmp_path, "some.jsonl", lines))
    assert [dialogue[0].user for dialogue in dataset.dialogues] == ["one", "two"]


def test_prompts(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines(), and not for JSON lines.
    lines = '{"prompt": "one two", "label": 1}\n\n{"prompt": "three\u2028four"}\n'
    dataset = read_dataset(_write(tmp_path, "some.jsonl", lines))
    assert (dataset.kind, dataset.texts) == ("prompts", ("one two", "three\u2028four"))
    assert dataset.sample(9) == "one two\nt"


def test_text(tmp_path: Path) -> None:
    dataset = read_dataset(_write(tmp_path, "book.txt", "[once upon a time]\n"))
    assert (dataset.kind, dataset.texts) == ("text", ("[once upon a time]\n",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", r"a\.json is not JSON: .*named \.jsonl"),
        ("a.json", {"conversations": []}, "expected a list of conversations, found a JSON dict"),
        ("a.json", [{"turns": []}], "entry 0: expected an object with a list 'conversations'"),
        ("a.json", [_said(("human", "x"), ("robot", "y"))], "entry 0, message 1: 'from' is 'robot'; allowed are .*gpt"),
        ("a.json", [{"conversations": [{"from": "human"}]}], "message 0: expected strings 'from' and 'value'"),
        ("a.json", [], "has no user messages"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2: not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "x"}', r"line 2: expected 'prompt' .*found \['text'\]"),
        ("a.jsonl", '{"prompt": null}', "line 1: 'prompt' is null, expected a string"),
        ("a.jsonl", '"x"', "line 1: expected an object, found a JSON str"),
        ("a.txt", " \n", "has no user messages"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_dataset(_write(tmp_path, name, content))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"missing\.json cannot be read"):
        read_dataset(tmp_path / "missing.json")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_dataset(tmp_path / "latin.txt")
