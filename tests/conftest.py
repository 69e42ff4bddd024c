"""Shared by all tests: which of them this machine can run, and with what."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from harness.engine import has_accelerator, servers_find_sglang_imported
from harness.imported_sglang import ImportedSGLang
from tests.cpu_time import CpuTime

# The tests' processes, and the servers that they start, share the cores. With a team of threads for each, the cores
# would spend much of their time on OpenMP threads that spin while they wait for others. Torch reads it at its import.
os.environ["OMP_NUM_THREADS"] = "1"

# Before anything imports Triton: it decides at import what it runs on.
if not has_accelerator():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What SGLang compiles for its page hash: for the SGLang of this environment, and once, whatever caches servers have.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

# A shell starts background jobs with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent.parent
PACKAGES = ("sgl_kvfetch", "triton_kernels")
Once = Callable[[str, Callable[[Path], object]], Path]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Spare runs without Hypothesis its import: its plugin imports it at the end, to look for what nobody wrote."""
    plugins = session.config.pluginmanager
    if "hypothesis" not in sys.modules and plugins.has_plugin("hypothesispytest"):
        plugins.unregister(name="hypothesispytest")


# Files that compute for minutes, in processes of their own. They go first: one worker would end with one of them while
# the other has nothing left.
LONGEST = ("tests/test_lowest.py::", "tests/triton_kernels/test_emulated_kernels.py::")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if not has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):  # `keywords` has the names of folders, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def has_cuda() -> bool:
    if not has_accelerator():
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let what servers keep of stores in the user's cache, such as audits, lie with the tests' files. What others keep
    there, such as compiled code, stays where it is, as do the models of `benchmarks`, which take long to make."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    ours = tmp_path_factory.mktemp("cache")
    for name in ("sgl_kvfetch-models", "sglang", "tvm-ffi", "huggingface", "matplotlib", "pip"):
        (users / name).mkdir(parents=True, exist_ok=True)
    for folder in users.iterdir():
        if folder.name != "sgl_kvfetch":
            (ours / folder.name).symlink_to(folder)
    os.environ["XDG_CACHE_HOME"] = str(ours)


@pytest.fixture(scope="session", autouse=True)
def imported_sglang(_own_cache: None) -> Iterator[ImportedSGLang | None]:
    """With an accelerator, None: its context does not survive a fork."""
    context: AbstractContextManager[ImportedSGLang | None]
    context = nullcontext() if has_accelerator() else servers_find_sglang_imported()
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


@pytest.fixture
def tiny_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a write evict any part of a store: these have room for a few segments, each more than a tenth."""
    monkeypatch.setattr("sgl_kvfetch.directory.room._EVICTED_PART", 1)


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
    from harness.models import make_tiny_llama

    return once("tiny-llama", make_tiny_llama)


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """The package's wheel, made of a copy of the sources."""
    (wheel,) = once("wheel", build_wheel).glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def engine_wheel(once: Once) -> Path:
    """The wheel of SGLang's CPU engine, made of a copy of the sources."""
    (wheel,) = once("engine-wheel", build_engine_wheel).glob("*.whl")
    return wheel


def build_wheel(folder: Path) -> None:
    copy_sources(folder)
    _build(folder)


def build_engine_wheel(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "cpu_engine", folder, ignore=ignored, dirs_exist_ok=True)
    _build(folder)


def _build(folder: Path) -> None:
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
    from benchmarks.real_model import is_available, real_model

    if not is_available():
        pytest.skip("needs the packages in scripts/requirements-model.txt, and gguf")
    return real_model()
