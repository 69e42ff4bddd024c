"""Shared by all tests: which of them this machine can run, and with what."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
import torch

import benchmarks.real_model
from harness.models import make_tiny_llama

# Before anything imports SGLang or Triton: both decide at import what they run on.
if not torch.accelerator.is_available():
    os.environ.setdefault("KVFETCH_CPU_ENGINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Names by which functions start a server or another process.
STARTERS = {
    *("CephProcess", "DataPlaneProcess", "RedisProcess", "SGLangServer", "StoreProcess", "SwiftProcess"),
    *("running_s3_server", "running_server", "multiprocessing", "subprocess"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out slow tests, and those that start a server or a process"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if config.getoption("--fast"):
        left_out = [item for item in items if starts_a_process(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def starts_a_process(item: pytest.Item) -> bool:
    """Return whether a test is slow, or it, its fixtures or what they call in the tests' own modules name a starter."""
    if any(mark in item.keywords for mark in ("slow", "sglang", "gpu")):
        return True
    assert isinstance(item, pytest.Function)
    fixtures = (found[-1].func for found in item._fixtureinfo.name2fixturedefs.values())
    functions, seen = [item.function, *fixtures], set()
    while functions:
        function = inspect.unwrap(functions.pop())
        if inspect.isfunction(function) and function.__module__.startswith("tests.") and function not in seen:
            seen.add(function)
            names = names_in(function.__code__)
            if not STARTERS.isdisjoint(names):
                return True
            functions += filter(inspect.isfunction, map(function.__globals__.get, names))
    return False


@functools.cache
def names_in(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(names_in, nested))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves this process's clock to so many seconds after the test's start."""
    start = time.time()

    def later(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: start + seconds)

    later(0)
    return later


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, made once."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """A small real language model, SmolLM2-135M-Instruct in bfloat16. It is made once, in the user's cache."""
    if not benchmarks.real_model.is_available():
        pytest.skip("needs the packages in scripts/requirements-model.txt, and gguf")
    return benchmarks.real_model.real_model()
