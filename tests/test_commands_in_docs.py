"""Every command that the documentation names: it exists, and takes these options and values."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.tools.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`((?:kvfetch |python -m benchmarks|scripts/)[^`]*)`")
_START = re.compile(r"(?:[A-Z_]+=\S+ )*(?=kvfetch |python -m benchmarks|scripts/)")
_COMMENT = re.compile(r"\s#.*")  # shlex would take STORE#PREFIX for one
_NOT_COMMANDS = {
    "kvfetch: ..., namespace ...",  # a message
}
_MODULES = {"scripts/demo": "benchmarks.demo", "scripts/gpu_check": "benchmarks.gpu_check"}  # where their options are


def commands_of(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield each command of a page as words. The flag says if it stands in a block, and so is complete."""
    text = page.read_text()
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if start := _START.match(line):
                yield shlex.split(_COMMENT.sub("", line[start.end() :].removesuffix("&"))), True
    for span in _SPAN.findall(BLOCK.sub("", text)):
        if span not in _NOT_COMMANDS:
            yield [word for word in re.sub(r"[\[\]]", " ", span).split() if word != "..."], False


COMMANDS = [
    pytest.param(words, whole, id=f"{page.relative_to(ROOT)}: {' '.join(words)}")
    for page in PAGES
    for words, whole in commands_of(page)
]


class ParsedError(Exception):
    """The arguments are right."""


def require_kvfetch(words: list[str], whole: bool) -> None:
    """Parse a command without running it; of a part of a command, look at its options only."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("kvfetch", list(words))
    name, command, rest = group.resolve_command(context, list(words))
    if whole:
        command.make_context(name, rest, parent=context)
        return
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in rest if word.startswith("--")} <= options


def require_benchmark(name: str, words: list[str], whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a benchmark up to where it has parsed its arguments."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    if not whole and not words:
        assert callable(module.main)
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: Any) -> None:
        parse(parser, *args)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr("sys.argv", [name, *words])
    with pytest.raises(ParsedError):
        module.main()


@pytest.mark.parametrize(("words", "whole"), COMMANDS)
def test_a_command_is_understood(
    words: list[str], whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some options open their files
    for word in words:
        if re.fullmatch(r"\w+\.\w+", word):
            (tmp_path / word).touch()
    program, *rest = words
    if program == "kvfetch":
        require_kvfetch(rest, whole)
    elif program == "python":
        require_benchmark(rest[1], rest[2:], whole, monkeypatch)
    else:
        assert (ROOT / program).is_file()
        if rest and rest != ["--help"] and program in _MODULES:
            require_benchmark(_MODULES[program], rest, whole, monkeypatch)


def test_the_configs_of_sglangs_commands_are_understood() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    configs = re.findall(r"--hicache-storage-backend-extra-config '(\{.*?\})'", text, re.DOTALL)
    assert configs
    for config in configs:
        parse_config(json.loads(config))
