"""Requests with different cache salts never share pages, requests with the same one do; and commands about prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, Expected, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared
from tests.tools.conftest import kvfetch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = make_prompt(0)
PAGES = len(PROMPT) // PAGE_SIZE


def ask(server: SGLangServer, salt: str | None) -> Generation:
    return server.generate(input_ids=PROMPT, max_new_tokens=ANSWER_TOKENS, logprobs=True, cache_salt=salt)


@pytest.mark.parametrize(("writer", "reader"), [("host", "device"), ("device", "host")])
def test_salts(
    writer: str, reader: str, store: StoreProcess, expected: Expected, request: pytest.FixtureRequest
) -> None:
    """What one server stored, the other one finds: they are processes of their own, in modes of their own."""
    salts = ("one", "two", None)
    shared: Shared = request.getfixturevalue(writer)
    with shared.attached(store.url, codec="zstd") as server:
        for num_before, salt in enumerate(salts):
            answer = ask(server, salt)  # after the same prompt of others, whose pages are in all tiers
            assert answer.cached_tokens == 0, salt
            assert same_answer(answer, expected[0])
            wait_until_written(server, (num_before + 1) * PAGES)
    other: Shared = request.getfixturevalue(reader)
    with other.attached(store.url, codec="zstd") as another:
        assert from_storage(ask(another, "three")) == 0
        for salt in salts:
            answer = ask(another, salt)
            assert from_storage(answer) >= 0.9 * len(PROMPT), salt
            assert same_answer(answer, expected[0])


def test_look_up_and_pin(model: Path, host: Shared, store: StoreProcess, tmp_path: Path) -> None:
    text = " ".join(f"w{token}" for token in PROMPT)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": text}) + "\n" + json.dumps({"prompt": make_prompt(1)}) + "\n")
    options = ("--file", str(file), "--cache-salt", "one", "--json")
    with host.attached(store.url, codec="zstd") as server:
        for prompt in (PROMPT, make_prompt(1)):
            server.generate(input_ids=prompt, max_new_tokens=1, cache_salt="one")
        wait_until_written(server, 2 * PAGES)
    tokenised = ("--model", str(model), "--page-size", str(PAGE_SIZE))
    result = kvfetch("why", store.url, *options, "--model", str(model))
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [(one["num_tokens"], one["num_pages"], one["stored_pages"]) for one in found] == [(640, PAGES, PAGES)] * 2
    result = kvfetch("pin", store.url, *options, *tokenised)
    assert result.exit_code == 0, result.output
    assert [list(pin["stored_pages"].values()) for pin in json.loads(result.output)] == [[PAGES]] * 2
