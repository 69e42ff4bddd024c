from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import sgl_kvfetch.plugin
from sgl_kvfetch.plugin.seams import Scope, Seam, check_seam, check_seams, installed_seams
from tests.plugin.sglang_places import PLACES
from tests.plugin.sglang_report import Row, fault, installed_places, report

# SGLang warns at import about everything that a CPU cannot do.
pytestmark = pytest.mark.filterwarnings("ignore")

PLUGIN_FILES = sorted(Path(sgl_kvfetch.plugin.__file__).parent.rglob("*.py"))


def _sglang_imports(file: Path) -> set[str]:
    """Return the dotted names that a file imports from SGLang."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"}
    return names


def test_the_installed_sglang_matches_the_table() -> None:
    assert check_seams() == []
    assert [wrong for place in installed_places() if (wrong := fault(place))] == []


@pytest.mark.parametrize("file", PLUGIN_FILES, ids=lambda file: file.name)
def test_every_import_from_sglang_is_in_the_table(file: Path) -> None:
    paths = [place.path for place in PLACES]
    absent = [n for n in _sglang_imports(file) if not any(p == n or p.startswith(n + ".") for p in paths)]
    assert not absent


def test_nothing_outside_the_plugin_imports_sglang() -> None:
    package = Path(sgl_kvfetch.plugin.__file__).parent.parent
    others = [file for file in package.rglob("*.py") if file not in PLUGIN_FILES]
    assert {file: names for file in others if (names := _sglang_imports(file))} == {}


@pytest.mark.parametrize("seam", installed_seams(), ids=lambda s: s.path.rpartition(".")[2])
def test_every_hook_resolves_and_takes_what_sglang_passes(seam: Seam) -> None:
    hook = pkgutil.resolve_name(seam.hook)
    leading = 1 if seam.kind in ("after", "around") else 0
    target = inspect.signature(pkgutil.resolve_name(seam.path))
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


def test_a_seam_without_its_target_is_one_message() -> None:
    seam = installed_seams({Scope.GATE})[0]
    moved = dataclasses.replace(seam, path="sglang.srt.server_args.ServerArgs.no_such")
    assert check_seam(seam) is None
    assert "sglang.srt.server_args.ServerArgs.no_such not found" in (check_seam(moved) or "")


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
