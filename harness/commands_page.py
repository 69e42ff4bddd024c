"""Write docs/commands.md from the help of each command: ``python -m harness.commands_page``."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import typer

from sgl_kvfetch.tools.app import COMMANDS, app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_GROUPS = {
    "Before you install anything, or when something is wrong": ("estimate", "bench", "compare", "doctor", "why"),
    "A store": ("serve", "inspect", "verify", "gc", "clear", "reindex"),
    "Prompts in a store": ("pin",),
    "A model's profile": ("calibrate", "profile"),
    "Video": ("encode",),
}
_PAGES = {
    "estimate": "sizing.md",
    "bench": "sizing.md#measure-it",
    "compare": "audits.md#compare-answers",
    "doctor": "operations.md",
    "why": "operations.md#why-a-prompt-was-not-served",
    "serve": "serving.md",
    "verify": "operations.md#damaged-segments",
    "reindex": "s3.md",
    "calibrate": "calibrating.md",
    "profile": "calibrating.md",
    "encode": "adaptive.md",
    **dict.fromkeys(("gc", "clear", "pin"), "retention.md"),
}
_SHARED_BY = 3  # commands, from which on an option is described once
_HEAD = """\
# The command line

STORE is a URL or a directory, and STORE#PREFIX is a part of a store. Commands that report something have `--json`, \
whose fields are listed. The exit code is 0, or 1 if the command found what its text names, or 2 if it could not work: \
then one line on stderr says why. `python -m harness.commands_page` wrote this page from each command's `--help`.
"""
_SHARED = """
## Options of several commands
"""
_ENVIRONMENT = """
## The environment

| variable | |
|---|---|
| `KVFETCH_TOKEN` | the token of an HTTP store, unless `--token-file` is given |
| `KVFETCH_TLS_CLIENT_CERT`, `KVFETCH_TLS_CLIENT_KEY` | PEM files with our certificate, for a store that demands one \
(`--tls-client-ca`), and with its key, unless that is in the same file |
| `SSL_CERT_FILE` | PEM file with the CAs that stores' certificates are checked against, in the place of the system's |
| `KVFETCH_INDEX_PASSWORD` | the password of an index that `--index` names: other users can see options |
| `SGLANG_API_KEY` | the key of an SGLang server (`--server`) |
| `AWS_*` | [settings](s3.md#settings) of `s3://` stores |
"""


def page() -> str:
    """Return the page: a table of commands by task, each command's help, and the options that several have."""
    assert set(COMMANDS) == set(chain.from_iterable(_GROUPS.values())), "each command belongs to one group"
    commands = {name: _command(name) for names in _GROUPS.values() for name in names}
    uses = Counter(chain.from_iterable(set(_options(command)) for command in commands.values()))
    shared = {item for item, count in uses.items() if count >= _SHARED_BY}
    lines = [_HEAD]
    for group, names in _GROUPS.items():
        lines += [f"**{group}**\n", "| command | |", "|---|---|"]
        lines += [f"| [`{name}`](#kvfetch-{name}) | {COMMANDS[name]}{_more(name)} |" for name in names]
        lines.append("")
    for name, command in commands.items():
        lines += _section(name, command, shared)
    return "\n".join([*lines, _SHARED, *sorted(shared), _ENVIRONMENT])


def _more(name: str) -> str:
    return f" ([more]({_PAGES[name]}))" if name in _PAGES else ""


def _command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    context = group.make_context("kvfetch", [name])
    return group.resolve_command(context, [name, "--help"])[1]


def _section(name: str, command: Any, shared: set[str]) -> Iterator[str]:
    """Yield the lines of a command: its usage, its text, its arguments and the options that are its own."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    required = [f"{each.opts[0]} {each.metavar}" for each in command.params if each not in arguments and each.required]
    usage = " ".join(["kvfetch", name, *map(_argument_name, arguments), *required, "[OPTION]..."])
    yield f"## kvfetch {name}\n\n```text\n{usage}\n```\n"
    yield from _text(inspect.cleandoc(command.help))
    yield ""
    options = _options(command)
    yield from _items(arguments)
    yield from (item for item in options if item not in shared)
    if others := [item.split("`")[1].split()[0] for item in options if item in shared]:
        yield f"* [Also](#options-of-several-commands) {', '.join(f'`{name}`' for name in others)}"
    yield ""


_CONTEXT = typer.main.get_command(app).make_context("kvfetch", [""], resilient_parsing=True)


def _argument_name(argument: Any) -> str:
    """Return what stands for an argument in the usage: its name there, or the words that it takes."""
    name: str = argument.metavar or argument.get_help_record(_CONTEXT)[0].split("<")[1].rstrip(">")
    return name


def _text(text: str) -> Iterator[str]:
    """Yield a docstring with its indented examples as one block of commands."""
    before, heading, examples = re.split(r"\n\n(Examples?\b.*:)\n\n", f"{text}\n\nExample:\n\n", maxsplit=1)[:3]
    yield before
    if commands := re.findall(r"^    (.*)$", examples, re.MULTILINE):
        yield f"\n{heading}\n\n```bash"
        yield from commands
        yield "```"


def _options(command: Any) -> list[str]:
    return list(_items(each for each in command.params if each.param_type_name == "option" and each.name != "help"))


def _items(parameters: Iterable[Any]) -> Iterator[str]:
    for parameter in parameters:
        names, text = parameter.get_help_record(_CONTEXT)
        if parameter.param_type_name == "argument":
            names = _argument_name(parameter)
        text = re.sub(r"\s*\[(required|default: .*|[^\[\]]*[<>]=[^\[\]]*)\]$", r" (\1)", text)
        yield f"* `{names}`: {text.strip().replace('*', chr(92) + '*')}"


if __name__ == "__main__":
    PAGE.write_text(page())
