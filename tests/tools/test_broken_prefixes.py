"""``kvfetch why --log``: where prompts break, in logs that are made for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.models import make_llama_8b_config
from tests.tools.conftest import kvfetch, kvfetch_json

_WORDS = [a + b for a in ("ka", "lo", "mi", "su", "re", "vo") for b in ("ban", "der", "nik", "tor", "sel")]
_KINDS = [
    "a random id",
    "a date or a time",
    "a task list",
    "an old turn that is rendered anew",
    "the same text in another order",
]


def words(seed: object, count: int) -> str:
    return " ".join(random.Random(str(seed)).choices(_WORDS, k=count))


def made(number: int) -> str:
    """A prompt of one of five applications. Each has a kind of broken prefix: the first one loses most by it."""
    kind, stays = number % 5, words(f"system {number % 5}", 500 - 100 * (number % 5))
    begins = f"<|system|>\nYou are assistant {'ABCDE'[kind]}.\n"
    asks = f"\n<|user|>\n\u2028{words(f'asks {number}', 20)}"
    rng = random.Random(number)
    if kind == 0:
        return f"{begins}Request {rng.getrandbits(64):016x}\n{stays}{asks}"
    if kind == 1:
        return f"{begins}Today is 2026-11-{1 + number // 5 % 28:02}, {number % 24:02}:10.\n{stays}{asks}"
    if kind == 2:
        tasks = [f"- [{'x' if rng.random() < 0.5 else ' '}] {words(f'task {task}', 4)}\n" for task in range(8)]
        return f"{begins}Tasks:\n{''.join(tasks)}{stays}{asks}"
    if kind == 3:  # the first turn of a conversation, or the second one, where the template drops the first thought
        talk, is_second = number // 10, number // 5 % 2
        thought = "" if is_second else f"<think>\n{words(f'thought {talk}', 30)}\n</think>\n"
        turns = f"<|user|>\n{words(f'first {talk}', 20)}\n<|assistant|>\n{thought}{words(f'answer {talk}', 160)}"
        return f"{begins}{turns}{asks if is_second else ''}"
    tools = [json.dumps({"name": f"tool {tool}", "does": words(f"tool {tool}", 30)}) for tool in range(4)]
    return f"{begins}Tools:\n{chr(10).join(rng.sample(tools, 4))}{asks}"


def of_sglang(prompt: str) -> str:
    return f"[2026-11-28 10:00:00] Receive: obj=GenerateReqInput(rid='7', text={prompt!r}, input_ids=None, stream=True)"


def of_sglang_in_json(prompt: str) -> str:
    events = ("request.received", "request.finished")
    lines = [{"event": event, "rid": "7", "obj": {"text": prompt}} for event in events]
    return "\n".join(f"[2026-11-28 10:00:00] {json.dumps(line, ensure_ascii=False)}" for line in lines)


def of_a_gateway(prompt: str) -> str:
    return json.dumps({"time": 7, "request": {"model": "m", "prompt": prompt}})


def write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in ("INFO: another line", "{not JSON", "[1]", *lines)))
    return str(path)


def found_in(path: Path, lines: Sequence[str], *options: str) -> list[dict[str, Any]]:
    found = kvfetch_json("why", "--log", write(path, lines), *options, exit_code=1)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("line", [of_sglang, of_sglang_in_json, of_a_gateway])
def test_five_kinds_of_broken_prefixes_are_found_in_order(tmp_path: Path, line: Callable[[str], str]) -> None:
    lines = [line(made(number)) for number in range(1000)]
    found = found_in(tmp_path / "log", lines)
    assert [each["looks_like"] for each in found] == _KINDS
    ids, dates = found[:2]
    assert ids["behind"].endswith("You are assistant A.\nRequest ")
    assert len(ids["was"]) == len(ids["became"]) == 16
    stays = len(words("system 0", 500)) // 4
    assert ids["num_requests"] == 199  # all but the first one
    assert 199 * stays <= ids["lost_tokens"] <= 199 * (stays + 10)
    assert ids["position"] == len("<|system|>\nYou are assistant A.\nRequest ") // 4
    assert dates["behind"].startswith("<|system|>\nYou are assistant B.\nToday is ")

    assert "1. a random id, after 10 equal tokens: " in kvfetch("why", "--log", str(tmp_path / "log")).output


def test_tokens_are_compared_as_they_are_and_shown_as_text_if_there_is_a_tokenizer(tmp_path: Path) -> None:
    model = str(make_llama_8b_config(tmp_path / "model"))
    stays = list(range(1000, 1100))
    prompts = [[5, 6, 7, number, *stays, 2_000 + number] for number in (20, 21, 22)] + [[1 << 31]]
    lines = [f"Receive: obj=GenerateReqInput(text=None, input_ids={prompt}, stream=False)" for prompt in prompts]
    (found,) = found_in(tmp_path / "log", lines)
    assert (found["position"], found["num_requests"], found["lost_tokens"]) == (3, 2, 200)
    assert (found["behind"], found["became"]) == ("[5, 6, 7]", "[21]")
    (found,) = found_in(tmp_path / "log", [json.dumps({"input_ids": prompt}) for prompt in prompts], "--model", model)
    assert found["became"].endswith("w21")


def test_messages_and_tools_of_a_gateway(tmp_path: Path) -> None:
    def request(date: str) -> str:
        system = {"role": "system", "content": f"Today is {date}.\n{words('system', 100)}"}
        user = {"role": "user", "content": [{"type": "text", "text": "And now?"}]}
        return json.dumps({"body": {"messages": [system, user], "tools": [{"name": "look"}], "temperature": 0}})

    (found,) = found_in(tmp_path / "log", [request("Monday"), request("Tuesday"), '{"messages": 5, "tools": 5}'])
    assert (found["looks_like"], found["was"], found["became"]) == ("a date or a time", "Monday.", "Tuesday.")
    assert found["behind"] == '{"name":"look"}\n<|system|>\nToday is '


def test_turns_that_are_appended_break_nothing(tmp_path: Path) -> None:
    talk = [words(f"turn {turn}", 100) for turn in range(5)]
    lines = [of_sglang(" ".join(talk[:turn])) for turn in (1, 2, 3, 3, 5, 4)]
    other = of_sglang(f"{talk[0]} {words('another turn', 100)}")
    log = write(tmp_path / "log", [*lines, other])
    assert kvfetch_json("why", "--log", log) == []
    assert kvfetch("why", "--log", log).output == "7 requests; no prefix is broken\n"
