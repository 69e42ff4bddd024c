"""What hosts and tools of the project read: workflows, templates, hooks, the changelog."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import sgl_kvfetch
from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS
from sgl_kvfetch.tools.terminal import how_to_install
from tests.tiers import RELEASE, files, slow_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_workflows_run_the_two_commands() -> None:
    runs, pythons = set(), set()
    for name in ("demo", "test"):
        for job in load(f".github/workflows/{name}.yml")["jobs"].values():
            assert job["timeout-minutes"] <= 90
            runs |= {step["run"] for step in job["steps"] if "run" in step}
            matrix = job.get("strategy", {}).get("matrix", {}).get("python", [])
            pythons |= {*matrix, *(step.get("with", {}).get("python-version") for step in job["steps"])}
    releases = "scripts/test --sglang ${{ matrix.sglang }}"
    assert runs == {"scripts/demo", "scripts/test", "scripts/test --fast", releases, "sudo scripts/test_servers"}
    assert all(os.access(ROOT / run.removeprefix("sudo ").split()[0], os.X_OK) for run in runs)
    assert {"3.11", "3.12", "3.13"} <= pythons
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_the_release_tier_has_six_parts_of_files_and_tests_that_exist() -> None:
    assert len(RELEASE) == 6
    for each in [*files(), *slow_files()]:
        path, _, test = each.partition("::")
        assert (ROOT / path).exists(), each
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), each
    assert len({*files()}) == len(files())
    runs = [step.get("run") for step in load(".github/workflows/release.yml")["jobs"]["test"]["steps"]]
    assert "scripts/test --release" in runs
    assert "scripts/test --release" in (ROOT / ".ci" / "run").read_text()


def test_actions_and_packages_are_those_that_somebody_looked_at() -> None:
    """A tag can be moved, and an index can serve another file."""
    for path in (ROOT / ".github" / "workflows").iterdir():
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.fullmatch(r" +- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), (path.name, line)
    listed = (ROOT / "deploy" / "requirements-store.txt").read_text().replace("\\\n", "").splitlines()
    assert all("==" in line and "--hash=sha256:" in line for line in listed if not line.startswith("#"))


def test_a_release_has_a_wheel_for_each_processor() -> None:
    """One wheel serves all Pythons, so it is built with the oldest one."""
    wheels = load(".github/workflows/release.yml")["jobs"]["wheels"]
    assert wheels["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert any(step.get("run", "").startswith("pipx run cibuildwheel==") for step in wheels["steps"])
    settings = PROJECT["tool"]["cibuildwheel"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert settings["build"] == f"cp{oldest}-manylinux_*"
    assert (ROOT / "deploy" / "requirements-store.txt").is_file()
    assert "{project}/deploy/requirements-store.txt" in settings["before-test"]


def test_extras_that_are_named_are_ours() -> None:
    named = re.compile(r"(?:sgl[_-]kvfetch|'\.)\[([a-z0-9,]+)\]")
    extras = PROJECT["project"]["optional-dependencies"]
    folders = (ROOT / name for name in ("docs", "examples", "deploy", "sgl_kvfetch"))
    for path in [ROOT / "README.md", *(each for folder in folders for each in folder.rglob("*"))]:
        if path.is_file() and path.suffix in ("", ".md", ".py", ".toml", ".sglang", ".yaml"):
            for found in named.findall(path.read_text()):
                assert {*found.split(",")} <= extras.keys(), path


def test_all_parts_of_a_release_have_one_version() -> None:
    version = sgl_kvfetch.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    chart = load("deploy/helm/kvfetch/Chart.yaml")
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev")
    for path in ("docs/operations.md", "examples/kubernetes/sglang.yaml"):
        assert set(re.findall(r"kvfetch:(\d+\.[\w.]+)", (ROOT / path).read_text())) == {version}
    # What is not released says so: a checkout would else pass for the release.
    newest = re.findall(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    if [version] != newest:
        numbers = re.fullmatch(r"(\d+\.\d+\.\d+)\.dev0", version)
        assert numbers, version
        assert all([*map(int, numbers[1].split("."))] > [*map(int, each.split("."))] for each in newest)


@pytest.mark.process
def test_a_tag_names_the_version() -> None:
    jobs = load(".github/workflows/release.yml")["jobs"]
    (check,) = {step["run"] for step in jobs["sources"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")}
    for ref, is_right in ((f"v{sgl_kvfetch.__version__}", True), ("v0.0.1", False), ("main", True)):
        kind = "tag" if ref.startswith("v") else "branch"
        variables = {"GITHUB_REF_NAME": ref, "GITHUB_REF_TYPE": kind, "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=variables, check=False)
        assert (done.returncode == 0) == is_right


def test_workflows_run_each_release_of_sglang() -> None:
    ours = importlib.metadata.version("sglang")
    tested = load(".github/workflows/test.yml")["jobs"]["releases"]["strategy"]["matrix"]["sglang"]
    assert tested == [*(version for version in SGLANG_VERSIONS if version != ours), "patched"]
    assert f"sglang=={ours}" in PROJECT["project"]["optional-dependencies"]["sglang"]


def test_nobody_is_told_to_install_our_name_from_pypi() -> None:
    """The name is free there, for anybody. What is ours is a checkout (``.``), or a wheel that was built from one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    by_name = re.compile(r"pip install\b[^\n]*[\s'\"]sgl[_-]kvfetch(?![\w-]*-\S*\.whl|\w)")
    assert by_name.search("pip install sgl-kvfetch")
    assert by_name.search("pip install 'sgl_kvfetch[s3]'")
    assert not by_name.search("pip install sgl_kvfetch-*.whl")
    found = []
    for name in listed.split("\0")[:-1]:
        if name != Path(__file__).relative_to(ROOT).as_posix() and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="replace")
            found += [f"{name}: {match[0]}" for match in by_name.finditer(text)]
    assert found == []
    required = {re.split(r"[^\w.-]", each)[0] for each in importlib.metadata.requires("sgl_kvfetch") or []}
    assert [command for each in required if by_name.search(command := how_to_install(each))] == []
