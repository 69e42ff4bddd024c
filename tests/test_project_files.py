"""What hosts and tools of the project read, and what all of its files tell people to install."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

import sgl_kvfetch
from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS
from tests.tiers import RELEASE, files, slow_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_tiers_have_files_and_tests_that_exist() -> None:
    assert len(RELEASE) == 6  # as .ci/run counts them
    for each in [*files(), *slow_files()]:
        path, _, test = each.partition("::")
        assert (ROOT / path).exists(), each
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), each
    assert len({*files()}) == len(files())


def test_actions_and_packages_are_those_that_somebody_looked_at() -> None:
    """A tag can be moved, and an index can serve another file."""
    for path in (ROOT / ".github" / "workflows").iterdir():
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.fullmatch(r" +- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), (path.name, line)
    listed = (ROOT / "deploy" / "requirements-store.txt").read_text().replace("\\\n", "").splitlines()
    assert all("==" in line and "--hash=sha256:" in line for line in listed if not line.startswith("#"))


def test_all_parts_of_a_release_have_one_version() -> None:
    version = sgl_kvfetch.__version__
    chart = load("deploy/helm/kvfetch/Chart.yaml")
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev")
    for path in ("docs/operations.md", "examples/kubernetes/sglang.yaml"):
        assert set(re.findall(r"kvfetch:(\d+\.[\w.]+)", (ROOT / path).read_text())) == {version}
    # What is not released says so: a checkout would else pass for the release.
    newest = re.findall(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert [version] == newest or version.endswith(".dev0")


def test_workflows_run_each_release_of_sglang() -> None:
    ours = importlib.metadata.version("sglang")
    tested = load(".github/workflows/test.yml")["jobs"]["releases"]["strategy"]["matrix"]["sglang"]
    assert tested == [*(version for version in SGLANG_VERSIONS if version != ours), "patched"]
    assert f"sglang=={ours}" in PROJECT["project"]["optional-dependencies"]["sglang"]


def test_people_are_told_to_install_a_checkout_and_extras_of_ours() -> None:
    """Our name is free on PyPI, for anybody. What is ours is a checkout (``.``), or a wheel that was built from one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    by_name = re.compile(r"pip install\b[^\n]*[\s'\"]sgl[_-]kvfetch(?![\w-]*-\S*\.whl|\w)")
    with_extras = re.compile(r"(?:sgl[_-]kvfetch|'\.)\[([a-z0-9,]+)\]")
    assert by_name.search("pip install sgl-kvfetch")
    assert not by_name.search("pip install sgl_kvfetch-*.whl")
    for path in (ROOT / name for name in listed.split("\0")[:-1]):
        if path != Path(__file__) and path.is_file():
            text = path.read_text(errors="replace")
            assert not by_name.search(text), path
            extras = {extra for found in with_extras.findall(text) for extra in found.split(",")}
            assert extras <= PROJECT["project"]["optional-dependencies"].keys(), path
