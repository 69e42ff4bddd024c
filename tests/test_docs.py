"""The documentation: its links, and the site that is made of it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import commands_page
from sgl_kvfetch.protocol.config import KVFetchConfig
from tests import crossings

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#([^)\s]+))?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def test_links_lead_to_files() -> None:
    """Of all pages; a strict build of the site sees those in docs/ alone."""
    for page in PAGES:
        for name, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
            file = page.parent / name
            assert file.exists(), (page, name)
            assert not anchor or file.suffix != ".md" or anchor in anchors(file), (page, name, anchor)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_module_has_tests_that_answer_first() -> None:
    """Those of its name, or those that docs/tests.md names."""
    rows = re.findall(r"^\| (\S+|the root): (.*) \| `(.*)` \|$", (ROOT / "docs" / "tests.md").read_text(), re.MULTILINE)
    assert [file for _, _, file in rows if not (ROOT / "tests" / file).is_file()] == []
    named = [
        f"{'' if folder == 'the root' else folder.strip('`')}{module}"
        for folder, modules, _ in rows
        for module in re.findall(r"`(\w+)`", modules)
    ]
    modules = {path.relative_to(ROOT / "sgl_kvfetch") for path in (ROOT / "sgl_kvfetch").rglob("[!_]*.py")}
    modules |= {path.relative_to(ROOT) for path in (ROOT / "triton_kernels").glob("*.py")}
    modules |= {Path("cpu_engine", path.name) for path in (ROOT / "cpu_engine" / "sglang_on_cpu").glob("[!_]*.py")}
    assert sorted(named) == sorted(
        str(module.with_suffix(""))
        for module in modules
        if not (ROOT / "tests" / module.with_name(f"test_{module.name}")).exists()
        and module.parts[:2] != ("plugin", "device")  # the tests of a folder are one suite
    )


def test_the_page_of_commands_is_their_help() -> None:
    """``python -m harness.commands_page`` writes it."""
    assert commands_page.PAGE.read_text() == commands_page.page()


@pytest.mark.process
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """Warnings are for broken links and anchors, and for pages that are missing in the navigation."""
    if shutil.which("mkdocs") is None:
        pytest.skip("needs mkdocs-material, as in the extra `dev`")
    built = subprocess.run(
        ["mkdocs", "build", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    # A file outside of docs/ lies where the links to it lead.
    assert 'href="../repository/deploy/alerts.yml"' in (tmp_path / "operations" / "index.html").read_text()
    assert (tmp_path / "repository" / "deploy" / "alerts.yml").is_file()


def test_each_config_key_belongs_to_a_feature_or_to_none() -> None:
    assert sorted([*crossings.KEYS, *crossings.OTHER_KEYS]) == sorted(KVFetchConfig.model_fields)
    assert {*crossings.KEYS.values()} <= {*crossings.FEATURES}


@pytest.mark.parametrize("test", [*crossings.ELSEWHERE.values(), *(test for test, _ in crossings.REFUSED.values())])
def test_a_pair_that_is_tested_elsewhere_names_a_test(test: str) -> None:
    path, name = test.partition("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_docs_have_the_table_of_crossings() -> None:
    """`python -m tests.crossings` prints it."""
    assert f"\n{crossings.table()}" in (ROOT / "docs" / "tests.md").read_text()
