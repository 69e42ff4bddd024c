"""Real SGLang, a real store over real sockets, real video, each in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

PAGE_SIZE = 16


def make_prompt(seed: int, num_tokens: int = 640) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


def ask(server: SGLangServer, prompt: list[int]) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=12, logprobs=True)


def from_storage(answer: Generation) -> int:
    return int(answer.cached_tokens_details.get("storage", 0))


def same_answer(found: Generation, expected: Generation) -> bool:
    """The same tokens, with logprobs equal up to what another split of the prefill does to float32 sums."""
    return found.output_ids == expected.output_ids and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.fixture(autouse=True)
def _show_the_logs_of_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Beside a failure."""
    caplog.set_level("INFO", "harness.engine")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("one") / "model")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights under the same name: the last component of the path, and everything but the weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("other") / "model", seed=1)


@dataclass(frozen=True)
class Expected:
    """Answers without any cache but SGLang's own, of a server that knows nothing of kvfetch."""

    answers: dict[int, Generation]
    half: Generation  # to make_half_prompt()

    def __getitem__(self, seed: int) -> Generation:
        return self.answers[seed]


NUM_PROMPTS = 24


def make_half_prompt() -> list[int]:
    """The first half of prompt 1, and another second one."""
    return make_prompt(1)[:320] + make_prompt(NUM_PROMPTS)[:320]


@pytest.fixture(scope="session")
def expected(model: Path) -> Expected:
    with SGLangServer(model) as server:
        answers = {seed: ask(server, make_prompt(seed)) for seed in range(NUM_PROMPTS)}
        server.flush()
        return Expected(answers, ask(server, make_half_prompt()))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path / "store") as process:
        yield process
