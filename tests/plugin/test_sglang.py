from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import types
from pathlib import Path
from typing import Any

import pytest

import sgl_kvfetch.plugin
from sgl_kvfetch.plugin import seams
from sgl_kvfetch.plugin.seams import SEAMS, Scope, Seam, check_seam, check_seams
from tests.plugin.sglang_places import PLACES, Place

# SGLang warns at import about everything that a CPU cannot do.
pytestmark = pytest.mark.filterwarnings("ignore")

PLUGIN_FILES = sorted(Path(sgl_kvfetch.plugin.__file__).parent.rglob("*.py"))


def _fault(place: Place) -> str | None:
    """Return what is wrong with one place (what was found and what was expected), or None."""
    try:
        target = pkgutil.resolve_name(place.path)
    except (ImportError, AttributeError) as error:
        return f"{place.path} not found ({error})"
    if place.params is not None:
        found = tuple(inspect.signature(target).parameters) if callable(target) else None
        if found != place.params:
            return f"{place.path}: found {found}, expected {place.params}"
    absent = [name for name in place.has if name not in _members(target)]
    absent += [name for name in place.mentions if name not in _mentioned(target)]
    return f"{place.path}: expected {', '.join(absent)}, found none of that name" if absent else None


def _members(target: Any) -> set[str]:
    """Return the attributes and fields of a class. A field without a default is not an attribute."""
    fields = {name for cls in getattr(target, "__mro__", ()) for name in inspect.get_annotations(cls)}
    return fields | set(dir(target))


def _mentioned(target: Any) -> set[str]:
    """Return the names that a function's code uses, with nested functions. Looks behind hooks."""
    function = inspect.unwrap(target)
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names


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
    assert [fault for place in PLACES if (fault := _fault(place))] == []


@pytest.mark.parametrize("file", PLUGIN_FILES, ids=lambda file: file.name)
def test_every_import_from_sglang_is_in_the_table(file: Path) -> None:
    paths = [place.path for place in PLACES]
    absent = [n for n in _sglang_imports(file) if not any(p == n or p.startswith(n + ".") for p in paths)]
    assert not absent


def test_nothing_outside_the_plugin_imports_sglang() -> None:
    package = Path(sgl_kvfetch.plugin.__file__).parent.parent
    others = [file for file in package.rglob("*.py") if file not in PLUGIN_FILES]
    assert {file: names for file in others if (names := _sglang_imports(file))} == {}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.path.rpartition(".")[2])
def test_every_hook_resolves_and_takes_what_sglang_passes(seam: Seam) -> None:
    hook = pkgutil.resolve_name(seam.hook)
    leading = 1 if seam.kind in ("after", "around") else 0
    target = inspect.signature(pkgutil.resolve_name(seam.path))
    given = [object()] * leading
    if seam.path.endswith("._do_create_backend"):
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
    assert _fault(place) is None
    assert message in (_fault(dataclasses.replace(place, **change)) or "")


def test_a_seam_without_its_target_is_one_message() -> None:
    moved = dataclasses.replace(SEAMS[0], path="sglang.srt.server_args.ServerArgs.no_such")
    assert check_seam(SEAMS[0]) is None
    assert "sglang.srt.server_args.ServerArgs.no_such not found" in (check_seam(moved) or "")


def test_another_version_is_named_with_the_expected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SGLANG_VERSION", "0.6.0")
    assert check_seams({Scope.GATE}) == ["found sglang 0.5.23, expected 0.6.0"]
