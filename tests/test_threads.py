"""docs/architecture.md names all threads and processes that the package starts, and no others."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import get_args

from sgl_kvfetch.directory.workers import Kind

ROOT = Path(__file__).parents[1]
_ROWS = (ROOT / "docs" / "architecture.md").read_text().partition("## Threads and processes")[2].splitlines()
_STARTS = {"ThreadPoolExecutor": (1, "thread_name_prefix"), "Thread": (2, "name")}  # where the name is


def named() -> set[str]:
    """Return the names in the first columns of the tables."""
    return {name for row in _ROWS if row.startswith("| `") for name in re.findall(r"`([^`]*)`", row.split("|")[1])}


def assert_threads(before: Collection[threading.Thread], names: set[str]) -> None:
    """Check that threads of these names, and otherwise only some of the tables', run beside those of ``before``. Data
    planes have their event loops on threads ``kvfetch`` here (`tests.plugin.planes`)."""
    ours = {re.sub(r"_\d+$", "", thread.name) for thread in {*threading.enumerate()} - {*before}}
    assert ours <= {*named(), "asyncio", "kvfetch"}
    assert ours >= names


def started() -> Iterator[tuple[str, str]]:
    """Yield the place where threads are started, and their name."""
    for file in (ROOT / "sgl_kvfetch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            position, keyword = _STARTS.get(ast.unparse(node.func).rpartition(".")[2], (None, ""))
            if position is not None:
                names = [*node.args[position : position + 1], *(k.value for k in node.keywords if k.arg == keyword)]
                name = ast.unparse(names[0]).strip("'") if names else ""
                yield f"{file.relative_to(ROOT)}:{node.lineno}", name


def test_the_table_has_every_thread() -> None:
    threads = dict(started())
    assert [place for place, name in threads.items() if "kvfetch" not in name] == []
    (workers,) = (place for place, name in threads.items() if "{" in name)
    assert workers.startswith("sgl_kvfetch/directory/workers.py")
    kinds = {f"kvfetch-{kind.removesuffix('s')}" for kind in get_args(Kind)}
    names = {name for name in threads.values() if "{" not in name} | kinds
    assert names == {name for name in named() if name.startswith("kvfetch")}


def test_the_table_has_every_process() -> None:
    modules = set()
    for file in (ROOT / "sgl_kvfetch").rglob("*.py"):
        modules |= set(re.findall(r'"-m", "(sgl_kvfetch[\w.]+)"', file.read_text()))
    assert modules == {name.rpartition(" ")[2] for name in named() if name.startswith("python -m")}
