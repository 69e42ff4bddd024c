from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
from pathlib import Path

import pytest

import sgl_kvfetch.plugin
from sgl_kvfetch.plugin import seams
from sgl_kvfetch.plugin.seams import SEAMS, Scope, Seam, Use, check_seam, check_seams

# SGLang warns at import of all that a CPU cannot do.
pytestmark = pytest.mark.filterwarnings("ignore")

PLUGIN_FILES = sorted(Path(sgl_kvfetch.plugin.__file__).parent.rglob("*.py"))


def _sglang_imports(file: Path) -> set[str]:
    """Dotted names that a file imports from SGLang."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"}
    return names


def test_the_installed_sglang_is_the_one_we_know() -> None:
    assert check_seams() == []


@pytest.mark.parametrize("file", PLUGIN_FILES, ids=lambda file: file.name)
def test_every_import_from_sglang_is_in_the_table(file: Path) -> None:
    paths = [seam.path for seam in SEAMS]
    absent = [n for n in _sglang_imports(file) if not any(p == n or p.startswith(n + ".") for p in paths)]
    assert not absent


def test_nothing_outside_the_plugin_imports_sglang() -> None:
    package = Path(sgl_kvfetch.plugin.__file__).parent.parent
    others = [file for file in package.rglob("*.py") if file not in PLUGIN_FILES]
    assert {file: names for file in others if (names := _sglang_imports(file))} == {}


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.hook], ids=lambda s: s.path.rpartition(".")[2])
def test_every_hook_resolves_and_takes_what_sglang_passes(seam: Seam) -> None:
    assert seam.hook is not None
    hook = pkgutil.resolve_name(seam.hook)
    leading = {Use.AFTER: 1, Use.AROUND: 1}.get(seam.use, 0)
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
        ({"params": ("argument",)}, "found (parser), expected (argument)"),
        ({"mentions": ("no_such",)}, "expected no_such"),
        ({"has": ("no_such",)}, "expected no_such"),
    ],
)
def test_a_broken_seam_is_one_message(change: dict[str, object], message: str) -> None:
    seam = next(seam for seam in SEAMS if seam.path.endswith(".add_cli_args"))
    assert check_seam(seam) is None
    assert message in (check_seam(dataclasses.replace(seam, **change)) or "")  # type: ignore[arg-type]


def test_another_version_is_named_with_the_expected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SGLANG_VERSION", "0.6.0")
    assert check_seams({Scope.GATE}) == ["found sglang 0.5.23, expected 0.6.0"]
