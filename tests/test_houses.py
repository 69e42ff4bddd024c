"""The houses: doors with what several modules outside use, docstrings, and how much there is to know."""

from __future__ import annotations

import ast
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("sgl_kvfetch", "triton_kernels", "cpu_engine")
HOUSES = ("codec", "stores", "directory", "protocol", "server", "engine", "plane", "plugin", "tools")
WITH_A_DOOR = ("codec", "stores", "directory", "protocol", "engine", "tools")
# Modules that others may enter: all that they have is for others.
OPEN = ("protocol.messages", "stores.upkeep", "stores.wire")
# What people import who use the package as a library.
FOR_PEOPLE = ("docs/library.md", "examples/compress.py")


def doors() -> dict[str, set[str]]:
    """Return the names that each house's door exports."""
    stubs = {house: ast.parse((ROOT / "sgl_kvfetch" / house / "__init__.pyi").read_text()) for house in WITH_A_DOOR}
    return {
        house: {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        for house, stub in stubs.items()
    }


@cache
def imports() -> dict[tuple[str, str, str], set[str]]:
    """Return what modules of the package import from other houses: by house, module in it ("" for the door) and name,
    the files that do."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for folder in ("sgl_kvfetch", "triton_kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT)
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sgl_kvfetch."):
                    house, _, module = node.module.removeprefix("sgl_kvfetch.").partition(".")
                    if house in HOUSES and house not in path.parts[1:-1]:
                        for alias in node.names:
                            found.setdefault((house, module, alias.name), set()).add(str(path))
    return found


def for_people() -> set[tuple[str, str]]:
    """Return the pairs of a house and a name that people import."""
    lines = "\n".join((ROOT / file).read_text() for file in FOR_PEOPLE)
    found = re.findall(r"^from sgl_kvfetch\.(\w+) import ([\w, ]+)$", lines, re.MULTILINE)
    return {(house, name) for house, names in found for name in names.split(", ")} | {("tools", "main")}


def test_a_door_has_what_several_modules_or_people_use() -> None:
    names = {(house, name) for house, exported in doors().items() for name in exported} - for_people()
    alone = {(house, name) for house, name in names if len(imports().get((house, "", name), ())) < 2}
    assert not alone, "one module uses them: let it import them from the modules that have them"


def test_what_is_imported_past_a_door_has_one_user() -> None:
    past: dict[str, set[str]] = {}
    for (house, module, name), files in imports().items():
        assert not name.startswith("_"), files
        if module and f"{house}.{module}" not in OPEN:
            past.setdefault(f"{house}: {name}", set()).update(files)
        if not module and house in WITH_A_DOOR and name not in doors()[house]:
            assert f"{house}.{name}" in OPEN, f"{name} is not at the door of {house}"
    several = {name: files for name, files in past.items() if len(files) > 1}
    assert not several, "several modules use them: export them from the house's door"


LONG = 20  # lines, from which on a function has a docstring


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for file, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_long_functions_say_what_they_do_for_their_caller() -> None:
    without = [
        f"{file}:{node.lineno} {node.name}"
        for file, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 >= LONG
        and not ast.get_docstring(node)
    ]
    assert without == []


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "concepts"))


def test_few_modules_name_a_concept() -> None:
    """`scripts/concepts --list` prints them."""
    for concept, (_, limit) in SCRIPT["CONCEPTS"].items():
        found = SCRIPT["modules_that_name"](concept)
        assert found, concept
        assert limit is None or len(found) <= limit, "\n".join(found)


def test_sglangs_process_imports_not_much() -> None:
    """`scripts/concepts --list` prints what, and why."""
    found = SCRIPT["reach"]()
    assert {"sgl_kvfetch.engine.process", "sgl_kvfetch.codec.quant.klt"} <= found.keys()  # through doors, too
    assert {what: n for what, n in SCRIPT["reach_sizes"]().items() if not 0 < n <= SCRIPT["REACH"][what]} == {}


def test_what_users_choose_from_does_not_grow() -> None:
    assert {what: n for what, n in SCRIPT["sizes"]().items() if not 0 < n <= SCRIPT["SIZES"][what]} == {}
