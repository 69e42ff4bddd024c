"""Shared by all tests: which of them this machine can run, and with what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


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
