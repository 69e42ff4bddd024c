"""Shared by all tests: which of them this machine can run, and with what."""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import CodeType

import pytest
import torch

import benchmarks.real_model
from harness.engine import servers_find_sglang_imported
from harness.imported_sglang import ImportedSGLang
from harness.models import make_tiny_llama
from tests.cpu_time import CpuTime

# Before anything imports SGLang or Triton: both decide at import what they run on.
if not torch.accelerator.is_available():
    os.environ.setdefault("KVFETCH_CPU_ENGINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tests' processes, and the servers that they start, share the cores. With a team of threads for each, the cores
# would spend much of their time on threads of OpenMP that spin while they wait for others.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent.parent
PACKAGES = ("sgl_kvfetch", "triton_kernels")
Once = Callable[[str, Callable[[Path], object]], Path]

# Names by which functions start a server or another process.
STARTERS = {
    *("CephProcess", "DataPlaneProcess", "RedisProcess", "SGLangServer", "StoreProcess", "SwiftProcess"),
    *("running_s3_server", "running_server", "multiprocessing", "subprocess"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out slow tests, and those that start a server or a process"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())


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
            for found in map(function.__globals__.get, names):
                functions += filter(inspect.isfunction, vars(found).values() if inspect.isclass(found) else [found])
    return False


@functools.cache
def names_in(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(names_in, nested))


@pytest.fixture(scope="session", autouse=True)
def imported_sglang() -> Iterator[ImportedSGLang | None]:
    """With an accelerator, None: its context does not survive a fork."""
    has_accelerator = torch.accelerator.is_available()
    context: AbstractContextManager[ImportedSGLang | None]
    context = nullcontext() if has_accelerator else servers_find_sglang_imported()
    with context as imported:
        yield imported


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves this process's clock to so many seconds after the test's start."""
    start = time.time()

    def later(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: start + seconds)

    later(0)
    return later


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Returns the folder with a name. The first of the tests' processes that asks for it makes it, for all of them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def once(name: str, make: Callable[[Path], object]) -> Path:
        made, unfinished = folder / name, folder / f"{name} (unfinished)"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(made)
        return made

    return once


@pytest.fixture(scope="session")
def tiny_llama(once: Once) -> Path:
    """A small random Llama."""
    return once("tiny-llama", make_tiny_llama)


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """The package's wheel, made of a copy of the sources."""
    (wheel,) = once("wheel", build_wheel).glob("*.whl")
    return wheel


def build_wheel(folder: Path) -> None:
    copy_sources(folder)
    pip("wheel", str(folder), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))


def copy_sources(folder: Path) -> None:
    """Copy what a wheel is built from: in a checkout, setuptools would pack deleted modules that it built before."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))


def pip(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, check=False)
    if "NewConnectionError" in done.stdout + done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def real_model() -> Path:
    """A small real language model, SmolLM2-135M-Instruct in bfloat16. It is made once, in the user's cache."""
    if not benchmarks.real_model.is_available():
        pytest.skip("needs the packages in scripts/requirements-model.txt, and gguf")
    return benchmarks.real_model.real_model()
