"""Real SGLang, a real store over real sockets, real video, each in a process of its own."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer, device_args, host_tier_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from tests.conftest import Once
from tests.e2e.shared import Shared

PAGE_SIZE = 16
ANSWER_TOKENS = 8


def make_prompt(seed: int, num_tokens: int = 640) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


def ask(server: SGLangServer, prompt: list[int]) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=ANSWER_TOKENS, logprobs=True)


def from_storage(answer: Generation) -> int:
    return int(answer.cached_tokens_details.get("storage", 0))


def same_answer(found: Generation, expected: Generation) -> bool:
    """The same tokens, with logprobs equal up to what another split of the prefill does to float32 sums."""
    return found.output_ids == expected.output_ids and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def assert_fetched(server: SGLangServer, seed: int, expected: Generation) -> None:
    """A stored prompt that the server does not have itself comes from the store, and its answer is as expected."""
    answer = ask(server, make_prompt(seed))
    assert from_storage(answer) >= 0.9 * 640
    assert same_answer(answer, expected)


def assert_computed(server: SGLangServer, seed: int, expected: Generation) -> None:
    """Nothing of a prompt comes from the store, and its answer is as expected."""
    answer = ask(server, make_prompt(seed))
    assert from_storage(answer) == 0
    assert same_answer(answer, expected)


@pytest.fixture(autouse=True)
def _show_the_logs_of_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Beside a failure."""
    caplog.set_level("INFO", "harness.engine")


@pytest.fixture(scope="session")
def model(once: Once) -> Path:
    return once("model 0", lambda folder: make_tiny_llama(folder / "model")) / "model"


@pytest.fixture(scope="session")
def other_model(once: Once) -> Path:
    """Other weights under the same name: the last component of the path, and everything but the weights."""
    return once("model 1", lambda folder: make_tiny_llama(folder / "model", seed=1)) / "model"


@pytest.fixture(scope="package")
def host(model: Path) -> Iterator[Shared]:
    """A server for host mode. It publishes KV events."""
    with closing(Shared(model, host_tier_args(), "wait_complete", publishes=True)) as shared:
        yield shared


@pytest.fixture(scope="package")
def device(model: Path) -> Iterator[Shared]:
    """A server for device mode. It publishes KV events."""
    with closing(Shared(model, device_args("http://nowhere"), None, publishes=True)) as shared:
        yield shared


@pytest.fixture(scope="package")
def other(other_model: Path) -> Iterator[Shared]:
    """A server for host mode, with other weights under the same name."""
    with closing(Shared(other_model, host_tier_args(), "wait_complete")) as shared:
        yield shared


@dataclass(frozen=True)
class Expected:
    """Answers without any cache but SGLang's own, of a server without a store."""

    answers: dict[int, Generation]
    half: Generation  # to make_half_prompt()

    def __getitem__(self, seed: int) -> Generation:
        return self.answers[seed]


NUM_STORED = 12


def make_half_prompt() -> list[int]:
    """The first half of prompt 1, and another second one."""
    return make_prompt(1)[:320] + make_prompt(NUM_STORED)[:320]


@pytest.fixture(scope="package")
def expected(host: Shared, once: Once) -> Expected:
    def compute(folder: Path) -> None:
        with host.detached() as server:
            answers = {seed: ask(server, make_prompt(seed)) for seed in range(NUM_STORED)}
            server.flush()
            (folder / "answers").write_bytes(pickle.dumps(Expected(answers, ask(server, make_half_prompt()))))

    found: Expected = pickle.loads((once("expected", compute) / "answers").read_bytes())
    return found


@pytest.fixture(scope="package")
def _filled(host: Shared, once: Once) -> Path:
    def fill(folder: Path) -> None:
        with StoreProcess(folder) as store, host.attached(store.url, codec="hevc") as writer:
            for seed in range(NUM_STORED):
                ask(writer, make_prompt(seed))
            wait_until_written(writer, NUM_STORED * 640 // PAGE_SIZE)

    return once("filled", fill)


@pytest.fixture(scope="module")
def filled(_filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's directory with the first prompts, for tests of a module to change."""
    return shutil.copytree(_filled, tmp_path_factory.mktemp("filled") / "store")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path / "store") as process:
        yield process
