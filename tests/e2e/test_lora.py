"""LoRA adapters with equal prompts: their pages are told apart, and found again, by what the adapters contain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_adapter
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, Expected, Generation, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = make_prompt(0)
LORA = ("--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "all", "--max-lora-rank", "4")


def ask(server: SGLangServer, adapter: str | None) -> Generation:
    return server.generate(input_ids=PROMPT, max_new_tokens=ANSWER_TOKENS, logprobs=True, adapter=adapter)


def load(server: SGLangServer, name: str, path: Path) -> None:
    server.request("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(server: SGLangServer, name: str) -> None:
    server.request("POST", "/unload_lora_adapter", {"lora_name": name})


def test_adapters_with_equal_prompts(model: Path, store: StoreProcess, expected: Expected, tmp_path: Path) -> None:
    """Two servers, in modes of their own, find what the other one stored."""
    one, two = (make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("one", "two")))
    elsewhere, adapters = tmp_path / "elsewhere", [*LORA, "--lora-paths", f"one={one}"]
    with SGLangServer(model, extra_args=[*hicache_args(store.url, codec="zstd"), *adapters]) as host:
        answers = {"one": ask(host, "one")}
        load(host, "two", two)
        answers |= {"two": ask(host, "two"), "none": ask(host, None)}
        assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 0]
        assert same_answer(answers["none"], expected[0])
        wait_until_written(host, 3 * PAGES)

        shutil.copytree(one, elsewhere)
        make_adapter(one, model, seed=2)  # trained again in the same place
        flags = [*device_args(store.url, codec="zstd"), *adapters]
        with SGLangServer(model, extra_args=flags) as device:
            retrained = ask(device, "one")
            assert retrained.cached_tokens == 0
            assert retrained.output_ids not in [answer.output_ids for answer in answers.values()]
            wait_until_written(device, PAGES)
            load(device, "moved", elsewhere)
            load(device, "two", two)
            for name, adapter in (("one", "moved"), ("two", "two"), ("none", None)):
                answer = ask(device, adapter)
                assert from_storage(answer) >= 0.9 * len(PROMPT), name
                assert same_answer(answer, answers[name]), name
            load_another_time(device, one, retrained)
            make_adapter(one, model, seed=3)
            load_another_time(device, one, None)

        make_adapter(one, model, seed=2)
        load_another_time(host, one, retrained)
        make_adapter(one, model, seed=4)
        load_another_time(host, one, None)


def load_another_time(server: SGLangServer, one: Path, stored: Generation | None) -> None:
    """After an unload, with content for which there is an answer in the store, or is none."""
    server.flush()
    unload(server, "one")
    load(server, "one", one)
    answer = ask(server, "one")
    if stored is None:
        assert answer.cached_tokens == 0
    else:
        assert from_storage(answer) >= 0.9 * len(PROMPT)
        assert same_answer(answer, stored)
