"""LoRA adapters with equal prompts: their pages are told apart, and found again, by what the adapters contain."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_adapter
from harness.store_process import StoreProcess
from tests.e2e.conftest import Expected, Generation, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = make_prompt(0)
LORA = ("--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "all", "--max-lora-rank", "4")


def ask(server: SGLangServer, adapter: str | None) -> Generation:
    return server.generate(input_ids=PROMPT, max_new_tokens=12, logprobs=True, adapter=adapter)


def load(server: SGLangServer, name: str, path: Path) -> None:
    server.request("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(server: SGLangServer, name: str) -> None:
    server.request("POST", "/unload_lora_adapter", {"lora_name": name})


@pytest.mark.parametrize("flags", [hicache_args, device_args], ids=["host", "device"])
def test_adapters_with_equal_prompts_over_a_restart(
    model: Path, store: StoreProcess, expected: Expected, tmp_path: Path, flags: Callable[..., list[str]]
) -> None:
    one, two = (make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("one", "two")))
    extra = [*flags(store.url, codec="zstd"), *LORA]
    with SGLangServer(model, extra_args=[*extra, "--lora-paths", f"one={one}"]) as server:
        answers = {"one": ask(server, "one")}
        load(server, "two", two)
        answers |= {"two": ask(server, "two"), "none": ask(server, None)}
        assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 0]
        assert same_answer(answers["none"], expected[0])
        wait_until_written(server, 3 * PAGES)

    elsewhere = shutil.copytree(one, tmp_path / "elsewhere")
    make_adapter(one, model, seed=2)  # trained again in the same place
    with SGLangServer(model, extra_args=[*extra, "--lora-paths", f"one={one}"]) as server:
        retrained = ask(server, "one")
        assert retrained.cached_tokens == 0
        assert retrained.output_ids not in [answer.output_ids for answer in answers.values()]
        wait_until_written(server, PAGES)
        load(server, "moved", elsewhere)
        load(server, "two", two)
        for name, adapter in (("one", "moved"), ("two", "two"), ("none", None)):
            answer = ask(server, adapter)
            assert from_storage(answer) >= 0.9 * len(PROMPT), name
            assert same_answer(answer, answers[name]), name

        # Loaded again after an unload, with the same and with other content.
        server.flush()
        unload(server, "one")
        load(server, "one", one)
        answer = ask(server, "one")
        assert from_storage(answer) >= 0.9 * len(PROMPT)
        assert same_answer(answer, retrained)
        unload(server, "one")
        make_adapter(one, model, seed=3)
        load(server, "one", one)
        assert ask(server, "one").cached_tokens == 0
