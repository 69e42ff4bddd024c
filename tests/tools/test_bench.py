"""`kvfetch bench` without a server: prompts, and what it refuses. tests/e2e/test_bench.py measures SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.tools.bench import _Metrics
from sgl_kvfetch.tools.bench_prompts import cut_prompts, read_conversations
from sgl_kvfetch.tools.sglang_server import open_server
from tests.tools.test_why import told_by_a_server

SAID = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]
TURNS = [("turn 1", "Be brief.\nOne?"), ("turn 2", "Be brief.\nOne?\n1\nTwo?")]


def test_each_turn_of_a_conversation_is_a_prompt(tmp_path: Path) -> None:
    openai = {"messages": [{"role": role, "content": text} for role, text in SAID]}
    sharegpt = {"id": "x", "conversations": [{"from": role, "value": text} for role, text in SAID[:-1]]}
    lines, listed = tmp_path / "log.jsonl", tmp_path / "sharegpt.json"
    lines.write_text(
        f"{json.dumps(openai)}\n\n{json.dumps({'prompt': [1, 2]})}\n{json.dumps({'prompt': 'left out'})}\n"
    )
    assert read_conversations(lines, 2) == [*((name, [text]) for name, text in TURNS), ("prompts", [[1, 2]])]
    listed.write_text(json.dumps([sharegpt, sharegpt]))
    assert read_conversations(listed, 9) == [(name, [text, text]) for name, text in TURNS]
    text = tmp_path / "prompt.txt"
    text.write_text("all of it\n")
    assert read_conversations(text, 9) == [("prompts", ["all of it\n"])]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": 1}\n', "x.jsonl:2: expected an object with 'prompt'"),
        ("x.json", '{"conversations": []}', "x.json: expected a list"),
        ("x.json", '[{"conversations": []}]', "has no prompts"),
        ("x.txt", " \n", "has no prompts"),
    ],
)
def test_a_file_without_prompts(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_conversations(tmp_path / name, 9)


def test_prompts_of_a_length_follow_one_another_in_the_text() -> None:
    groups = cut_prompts([5, 6, 7], [2, 4], 2)
    assert [(group.name, group.prompts) for group in groups] == [
        ("2 tokens", [[5, 6], [7, 5]]),
        ("4 tokens", [[6, 7, 5, 6], [7, 5, 6, 7]]),
    ]


async def test_what_waits_in_the_servers_queue_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than that the server does not write."""
    monkeypatch.setattr("sgl_kvfetch.tools.bench._LOOK_EVERY_S", 0.0)
    metrics = "".join(
        f"sgl_kvfetch_{name} {value}\n"
        for name, value in (("written_pages_total", 3), ('queued_bytes{queue="write"}', 1 << 20))
    )
    with told_by_a_server(None, metrics) as url:
        async with open_server(url) as session:
            found = _Metrics(session, url)
            with pytest.raises(ConfigError, match=r"wrote 0 of 5 pages within 0 s, and 1 MiB .* raise --timeout"):
                await found.wait_until_written(await found.read(), 5, 0.0)
