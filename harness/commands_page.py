"""Write docs/commands.md from the help of each command: ``python -m harness.commands_page``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
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
    "estimate": "gpus.md#estimate-it",
    "bench": "gpus.md#measure-it",
    "compare": "operations.md#compare-answers",
    "doctor": "operations.md",
    "why": "operations.md#why-a-prompt-was-not-served",
    "serve": "stores.md",
    "verify": "operations.md#damaged-segments",
    "reindex": "stores.md#s3-and-redis",
    "calibrate": "klt.md",
    "profile": "klt.md#publish-replace-withdraw",
    "encode": "adaptive.md",
    **dict.fromkeys(("gc", "clear", "pin"), "stores.md#what-a-store-deletes"),
}
_HEAD = """\
# Commands

What each command is for. Its `--help` explains it in full: what it does, each option with its default, the fields \
of `--json`, and its exit codes.

STORE is http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory. STORE#PREFIX is a part \
of it, where PREFIX is the start of object names, such as a namespace. Exit codes are 0, 1 if the command found what \
its help names, and 2 if it could not work: then one line on stderr says why.
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
| `AWS_*` | [settings](stores.md#settings) of `s3://` stores |
"""


def page() -> str:
    """Return the page: the commands by task, each with what it is for, examples and the names of its options."""
    assert set(COMMANDS) == set(chain.from_iterable(_GROUPS.values())), "each command belongs to one group"
    lines = [_HEAD]
    for group, names in _GROUPS.items():
        lines.append(f"## {group}\n")
        for name in names:
            lines += _section(name)
    return "\n".join([*lines, f"{_ENVIRONMENT}\n`python -m harness.commands_page` wrote this page.\n"])


def _section(name: str) -> Iterator[str]:
    """Yield the lines of a command: what it is for, its indented examples, and the names of its options."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("kvfetch", [name])
    command = group.resolve_command(context, [name, "--help"])[1]
    text = inspect.cleandoc(command.help)
    yield f"### kvfetch {name}\n"
    yield text.partition("\n\n")[0] + (f" [More]({_PAGES[name]})." if name in _PAGES else "")
    examples = re.split(r"\n\nExamples?\b.*:\n\n", text, maxsplit=1)[1:]
    if commands := re.findall(r"^    (.*)$", "".join(examples), re.MULTILINE):
        yield from ("\n```bash", *commands, "```\n")
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    records = [each.get_help_record(context)[0].split() for each in options]
    yield "Options: " + ", ".join(f"`{' '.join(x for x in words if x[0] == '-')}`" for words in records) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
