from __future__ import annotations

import ast
import dataclasses
import inspect
import types
from pathlib import Path
from typing import Any

import pytest

import sgl_kvfetch.plugin
import sglang_on_cpu
from sgl_kvfetch.plugin.seams import SEAMS, Seam, check_name, check_seams, find, has, installed_seams
from sgl_kvfetch.plugin.versions import table_version
from sglang_on_cpu.seams import SEAMS as CPU_SEAMS
from tests.plugin.sglang_places import PLACES, Place

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


def fault(place: Place) -> str | None:
    """Return what is wrong with one place (what was found and what was expected), or None."""
    if (wrong := check_name(place.path)) is not None:
        return wrong
    target = find(place.path)
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


def test_the_installed_sglang_matches_the_table() -> None:
    """With ``scripts/test --sglang VERSION``, another release: this is the first thing to run when one comes out."""
    assert check_seams([*SEAMS, *CPU_SEAMS]) == []
    places = [place for place in PLACES if table_version() in place.versions and (not place.patch or has(place.patch))]
    assert [f"{place.why}: {wrong}" for place in places if (wrong := fault(place))] == []


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
        ({"params": ("argument",)}, "found ('parser',), expected ('argument',)"),
        ({"mentions": ("no_such",)}, "expected no_such"),
        ({"has": ("no_such",)}, "expected no_such"),
    ],
)
def test_a_place_that_moved_is_one_message(change: dict[str, Any], message: str) -> None:
    place = next(place for place in PLACES if place.path.endswith(".add_cli_args"))
    assert fault(place) is None
    assert message in (fault(dataclasses.replace(place, **change)) or "")


def test_a_module_that_cannot_be_imported_is_one_message_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang's are where a shared library is missing."""
    package = tmp_path / "broken_sglang"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("kernels.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    for name in ("scheduler", "cache"):
        package.joinpath(f"{name}.py").write_text("import broken_sglang.kernels\nclass Name: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("scheduler.Name.one", "scheduler.Name.two", "cache.Name", "gone.Name")
    paths = [f"broken_sglang.{name}" for name in names]
    cause = "OSError: libcudart.so.13: cannot open shared object file"
    assert check_seams([Seam(path, "before", "no.hook") for path in paths]) == [
        f"broken_sglang.scheduler cannot be imported: {cause}",
        "broken_sglang.gone.Name not found (module 'broken_sglang' has no attribute 'gone')",
    ]
    assert check_name(paths[0]) == f"broken_sglang.scheduler cannot be imported: {cause}"
    with pytest.raises(ImportError, match="cannot be imported"):
        find(paths[0])
    assert not has(paths[0])
