from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import sgl_kvfetch.plugin
import sglang_on_cpu
from sgl_kvfetch.plugin.seams import SEAMS, Seam, check_name, check_seams, find, has, installed_seams
from sglang_on_cpu.seams import SEAMS as CPU_SEAMS
from tests.plugin.sglang_places import PLACES
from tests.plugin.sglang_report import Row, fault, installed_places, report

# SGLang warns at import about everything that a CPU cannot do.
pytestmark = pytest.mark.filterwarnings("ignore")

PLUGIN_FILES = sorted(Path(sgl_kvfetch.plugin.__file__).parent.rglob("*.py"))
ENGINE_FILES = sorted(Path(sglang_on_cpu.__file__).parent.rglob("*.py"))


def _sglang_imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"}
    return names


def test_the_installed_sglang_matches_the_table() -> None:
    assert check_seams([*SEAMS, *CPU_SEAMS]) == []
    assert [wrong for place in installed_places() if (wrong := fault(place))] == []


@pytest.mark.parametrize("file", [*PLUGIN_FILES, *ENGINE_FILES], ids=lambda file: file.name)
def test_every_import_from_sglang_is_in_the_table(file: Path) -> None:
    paths = [place.path for place in PLACES]
    absent = [n for n in _sglang_imports(file) if not any(p == n or p.startswith(n + ".") for p in paths)]
    assert not absent


@pytest.mark.parametrize("seam", installed_seams([*SEAMS, *CPU_SEAMS]), ids=lambda s: s.path.rpartition(".")[2])
def test_every_hook_resolves_and_takes_what_sglang_passes(seam: Seam) -> None:
    hook = find(seam.hook)
    leading = 1 if seam.kind in ("after", "around") else 0
    target = inspect.signature(find(seam.path))
    given = [object()] * leading
    if seam.path.endswith("create_backend"):
        given.append(object())  # the class, which its signature leaves out
    by_name: dict[str, object] = {}
    for name, parameter in target.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            by_name[name] = object()
        elif parameter.kind is not parameter.VAR_KEYWORD and parameter.default is parameter.empty:
            given.append(object())
    inspect.signature(hook).bind(*given, **by_name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "sglang.srt.server_args.ServerArgs.no_such"}, "sglang.srt.server_args.ServerArgs.no_such not found"),
        ({"path": "sglang.srt.no_such.thing"}, "sglang.srt.no_such.thing not found"),
        ({"params": ("argument",)}, "found ('parser',), expected ('argument',)"),
        ({"mentions": ("no_such",)}, "expected no_such"),
        ({"has": ("no_such",)}, "expected no_such"),
    ],
)
def test_a_place_that_moved_is_one_message(change: dict[str, Any], message: str) -> None:
    place = next(place for place in PLACES if place.path.endswith(".add_cli_args"))
    assert fault(place) is None
    assert message in (fault(dataclasses.replace(place, **change)) or "")


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package with modules that cannot be imported, as SGLang's are where a shared library is missing."""
    package = tmp_path / "broken_sglang"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("kernels.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    package.joinpath("too_old.py").write_text("import os; os.no_such_name\n")
    for name in ("scheduler", "cache"):
        package.joinpath(f"{name}.py").write_text("import broken_sglang.kernels\nclass Name: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package.name


def test_a_module_that_cannot_be_imported_shows_the_cause(broken_package: str) -> None:
    for name, cause in {
        "scheduler": "OSError: libcudart.so.13: cannot open shared object file",
        "too_old": "AttributeError: module 'os' has no attribute 'no_such_name'",
    }.items():
        path = f"{broken_package}.{name}.Name.method"
        message = f"{broken_package}.{name} cannot be imported: {cause}"
        assert check_name(path) == message
        assert fault(dataclasses.replace(PLACES[0], path=path)) == message
        with pytest.raises(ImportError, match="cannot be imported"):
            find(path)
        assert not has(path)


def test_one_cause_is_one_message(broken_package: str) -> None:
    names = ("scheduler.Name.one", "scheduler.Name.two", "cache.Name", "gone.Name")
    table = [Seam(f"{broken_package}.{name}", "before", "no.hook") for name in names]
    cause = "OSError: libcudart.so.13: cannot open shared object file"
    assert check_seams(table) == [
        f"{broken_package}.scheduler cannot be imported: {cause}",
        f"{broken_package}.gone.Name not found (module '{broken_package}' has no attribute 'gone')",
    ]


def test_a_report_has_both_signatures_of_what_is_broken() -> None:
    ours: list[Row] = [("seam a.b", "hook", None, "(self, x)"), ("place c", "why", None, "(y)")]
    theirs: list[Row] = [("seam a.b", "hook", "a.b not found", "not there"), ("place c", "why", None, "(y)")]
    assert report("0.5.24", theirs, "0.5.23", ours).splitlines() == [
        "seams of sglang 0.5.24: 0 as expected, 1 not",
        "places of sglang 0.5.24: 1 as expected, 0 not",
        "",
        "seam a.b: hook",
        "  a.b not found",
        "  0.5.23: (self, x)",
        "  0.5.24: not there",
    ]
