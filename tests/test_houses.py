"""The houses: contracts that a linter checks, doors with what several modules outside use, and docstrings."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sgl_kvfetch", "triton_kernels", "cpu_engine")
HOUSES = ("codec", "stores", "directory", "protocol", "server", "engine", "plane", "plugin", "tools")
WITH_A_DOOR = ("codec", "stores", "directory", "protocol", "engine", "tools")
# Modules that others may enter: all that they have is for others.
OPEN = ("protocol.messages", "stores.upkeep", "stores.wire")
# What people import who use the package as a library.
FOR_PEOPLE = ("docs/library.md", "examples/compress.py")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("lint-imports"))
    command = [program, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "sgl_kvfetch", folder / "sgl_kvfetch", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "line", "contract"),
    [
        ("stores", "def f():\n    from sgl_kvfetch.directory import LocalStore", "Each house may enter only"),
        ("plugin", "from sgl_kvfetch.stores import Store", "The engine's process enters neither"),
        ("plane", "import sglang", "Only plugin/ imports sglang"),
        ("plugin", "import sglang_on_cpu", "The package does not know the CPU engine"),
        ("codec", "import aiohttp", "The codec and the directory do no network I/O"),
    ],
)
def test_a_violation_is_refused(copy: Path, place: str, line: str, contract: str) -> None:
    module = copy / "sgl_kvfetch" / place / "violation.py"
    module.write_text(f"{line}\n")
    try:
        linted = lint(copy)
    finally:
        module.unlink()
    assert linted.returncode == 1
    broken = re.findall(r"^(.*) BROKEN", linted.stdout, re.MULTILINE)
    assert broken
    assert any(name.startswith(contract) for name in broken), broken
    assert "violation" in linted.stdout


@pytest.mark.parametrize("house", HOUSES)
def test_a_house_says_what_it_is_for_and_its_door_opens(house: str) -> None:
    door = importlib.import_module(f"sgl_kvfetch.{house}")
    assert door.__doc__
    assert len(door.__doc__.strip().splitlines()) >= 5
    for name in getattr(door, "__all__", ()):
        assert getattr(door, name) is not None


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


@pytest.mark.parametrize("house", WITH_A_DOOR)
def test_a_door_has_what_several_modules_or_people_use(house: str) -> None:
    users = {name: imports().get((house, "", name), set()) for name in doors()[house]}
    alone = {name for name, files in users.items() if len(files) < 2 and (house, name) not in for_people()}
    assert not alone, "one module uses them: let it import them from the modules that have them"


def test_what_is_imported_past_a_door_has_one_user() -> None:
    past: dict[str, set[str]] = {}
    for (house, module, name), files in imports().items():
        where = f"{house}.{module}"
        if module and where not in OPEN:
            past.setdefault(f"{house}: {name}", set()).update(files)
        if not module and house in WITH_A_DOOR and name not in doors()[house]:
            assert f"{house}.{name}" in OPEN, f"{name} is not at the door of {house}"
    several = {name: files for name, files in past.items() if len(files) > 1}
    assert not several, "several modules use them: export them from the house's door"


def test_nobody_imports_a_private_name_of_another_house() -> None:
    assert not {each for each in imports() if each[2].startswith("_")}


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
    sizes = SCRIPT["reach_sizes"]()
    assert {what: count for what, count in sizes.items() if not 0 < count <= SCRIPT["REACH"][what]} == {}


def test_what_users_choose_from_does_not_grow() -> None:
    found = SCRIPT["sizes"]()
    assert found.keys() == SCRIPT["SIZES"].keys()
    assert {what: count for what, count in found.items() if not 0 < count <= SCRIPT["SIZES"][what]} == {}
