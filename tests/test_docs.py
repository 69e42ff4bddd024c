"""The documentation: its links, and the site that is made of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sgl_kvfetch.codec.container.manifest import MAX_MANIFEST_BYTES
from sgl_kvfetch.plane.fetch import finder
from sgl_kvfetch.server.budget import BUDGET_BYTES
from sgl_kvfetch.stores.wire import MAX_LOOKUP_ANSWER_BYTES

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


def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """Warnings are for broken anchors, and for pages that are missing in the navigation or in the folder."""
    if shutil.which("mkdocs") is None:
        pytest.skip("needs mkdocs-material, as in the extra `dev`")
    built = subprocess.run(
        ["mkdocs", "build", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "Quick start" in (tmp_path / "index.html").read_text()


def test_the_pages_have_the_limits_of_the_code() -> None:
    security, serving = ((ROOT / "docs" / name).read_text() for name in ("security.md", "serving.md"))
    limits = (
        (security, "a manifest", MAX_MANIFEST_BYTES),
        (security, "the manifests of one answer to a lookup", MAX_LOOKUP_ANSWER_BYTES),
        (security, "all manifests that a rank remembers, or that requests use", finder._MAX_HELD_BYTES),
        (serving, "answer to a lookup", MAX_LOOKUP_ANSWER_BYTES),
        (serving, "memory for all requests together", BUDGET_BYTES),
    )
    for page, what, num_bytes in limits:
        (row,) = re.findall(rf"^\| {what} \| (.*) \|$", page, re.MULTILINE)
        assert re.match(rf"{num_bytes >> 20} MiB\b", row), (what, row)
