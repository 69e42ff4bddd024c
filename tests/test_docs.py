"""The documentation: its links, and the site that is made of it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import commands_page
from sgl_kvfetch.codec.container.manifest import MAX_MANIFEST_BYTES
from sgl_kvfetch.plane.fetch import finder
from sgl_kvfetch.protocol.config import KVFetchConfig
from sgl_kvfetch.server.bodies import BUDGET_BYTES
from sgl_kvfetch.stores.wire import MAX_LOOKUP_ANSWER_BYTES
from tests import crossings

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#([^)\s]+))?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = [(page.parent / file, anchor) for file, anchor in _LINK.findall(_CODE.sub("", page.read_text()))]
    assert [file for file, _ in links if not file.exists()] == []
    assert [
        (file, anchor) for file, anchor in links if anchor and file.suffix == ".md" and anchor not in anchors(file)
    ] == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {(file.name, file.read_text().splitlines()[0].lstrip("# ")) for file in folder.glob("0*.md")}
    assert set(re.findall(r"^\* \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE)) == {
        (title, name) for name, title in records
    }


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


def test_what_contributing_says_to_read_is_there() -> None:
    begin = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to begin")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z_/]+\.py)`", begin)
    assert len(names) >= 15
    assert [name for name in names if not (ROOT / name).exists() and not (ROOT / "sgl_kvfetch" / name).exists()] == []


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
    assert "Quick start" in (tmp_path / "index.html").read_text()
    # A file outside of docs/ lies where the links to it lead.
    assert 'href="../repository/deploy/alerts.yml"' in (tmp_path / "operations" / "index.html").read_text()
    assert (tmp_path / "repository" / "deploy" / "alerts.yml").read_text() == (
        ROOT / "deploy" / "alerts.yml"
    ).read_text()


def test_the_page_of_stores_has_the_limits_of_the_code() -> None:
    page = (ROOT / "docs" / "stores.md").read_text()
    limits = (
        ("a manifest", MAX_MANIFEST_BYTES),
        ("the manifests of one answer to a lookup", MAX_LOOKUP_ANSWER_BYTES),
        ("all manifests that a rank remembers, or that requests use", finder._MAX_HELD_BYTES),
        ("answer to a lookup", MAX_LOOKUP_ANSWER_BYTES),
        ("memory for all requests together", BUDGET_BYTES),
    )
    for what, num_bytes in limits:
        (row,) = re.findall(rf"^\| {what} \| (.*) \|$", page, re.MULTILINE)
        assert re.match(rf"{num_bytes >> 20} MiB\b", row), (what, row)


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
