"""Who shares pages: requests with the same cache salt do, and those with others never. Nor do engines take the pages of
others whose page size or type of KV differ. Pages of LoRA adapters are told apart, and found again, by what
the adapters contain."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_adapter
from harness.store_process import StoreProcess
from sgl_kvfetch.keys import NAMESPACE_PATTERN
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, Expected, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = make_prompt(0)
PAGES = len(PROMPT) // PAGE_SIZE


def ask(server: SGLangServer, salt: str | None = None) -> Generation:
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


def test_page_sizes_and_types_of_kv_do_not_mix(model: Path, host: Shared, store: StoreProcess) -> None:
    """Nothing comes from what another engine stored, and all from what the engine stored itself."""
    with host.attached(store.url, codec="zstd") as server:
        ask(server)
        wait_until_written(server, PAGES)
    flags = [*hicache_args(store.url, codec="zstd"), "--page-size", "64", "--kv-cache-dtype", "fp8_e4m3"]
    with SGLangServer(model, extra_args=flags) as server:
        first = ask(server)
        assert from_storage(first) == 0
        wait_until_written(server, len(PROMPT) // 64)
        server.flush()
        second = ask(server)
        assert from_storage(second) >= 0.9 * len(PROMPT) - 64
        assert second.output_ids == first.output_ids
        assert "kv dtype float8_e4m3fn" in server.log()
    assert len([d for d in store.directory.iterdir() if re.fullmatch(NAMESPACE_PATTERN, d.name)]) == 2


LORA = ("--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "all", "--max-lora-rank", "4")


def ask_adapter(server: SGLangServer, adapter: str | None) -> Generation:
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
        answers = {"one": ask_adapter(host, "one")}
        load(host, "two", two)
        answers |= {"two": ask_adapter(host, "two"), "none": ask_adapter(host, None)}
        assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 0]
        assert same_answer(answers["none"], expected[0])
        wait_until_written(host, 3 * PAGES)

        shutil.copytree(one, elsewhere)
        make_adapter(one, model, seed=2)  # trained again in the same place
        flags = [*device_args(store.url, codec="zstd"), *adapters]
        with SGLangServer(model, extra_args=flags) as device:
            retrained = ask_adapter(device, "one")
            assert retrained.cached_tokens == 0
            assert retrained.output_ids not in [answer.output_ids for answer in answers.values()]
            wait_until_written(device, PAGES)
            load(device, "moved", elsewhere)
            load(device, "two", two)
            for name, adapter in (("one", "moved"), ("two", "two"), ("none", None)):
                answer = ask_adapter(device, adapter)
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
    answer = ask_adapter(server, "one")
    if stored is None:
        assert answer.cached_tokens == 0
    else:
        assert from_storage(answer) >= 0.9 * len(PROMPT)
        assert same_answer(answer, stored)
