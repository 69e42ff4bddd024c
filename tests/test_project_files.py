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


def test_a_release_has_a_wheel_for_each_processor() -> None:
    """One wheel serves all Pythons, so it is built with the oldest one."""
    wheels = load(".github/workflows/release.yml")["jobs"]["wheels"]
    assert wheels["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert any(step.get("uses", "").startswith("pypa/cibuildwheel@") for step in wheels["steps"])
    settings = PROJECT["tool"]["cibuildwheel"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert settings["build"] == f"cp{oldest}-manylinux_*"
    assert (ROOT / "deploy" / "requirements-store.txt").is_file()
    assert "{project}/deploy/requirements-store.txt" in settings["before-test"]


def newest_release() -> str:
    """By the changelog."""
    return re.findall(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]


def test_all_parts_of_a_release_have_one_version() -> None:
    version = sgl_kvfetch.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    chart = load("deploy/helm/kvfetch/Chart.yaml")
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev")
    for path in ("docs/deploy.md", "examples/kubernetes/sglang.yaml"):
        assert set(re.findall(r"kvfetch:(\d+\.[\w.]+)", (ROOT / path).read_text())) == {version}
    assert f"`main`, {'.'.join(newest_release().split('.')[:2])}.x" in (ROOT / "SECURITY.md").read_text()


def test_what_is_not_released_says_so() -> None:
    """A checkout would else pass for the release, whose stores and servers do less (docs/upgrading.md)."""
    version = sgl_kvfetch.__version__
    if version != newest_release():
        numbers = re.fullmatch(r"(\d+\.\d+\.\d+)\.dev0", version)
        assert numbers, version
        assert [int(n) for n in numbers[1].split(".")] > [int(n) for n in newest_release().split(".")]


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


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_templates_ask_for_what_is_needed(name: str) -> None:
    form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_hooks_are_the_tools_of_the_environment() -> None:
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {f".venv/bin/{name}" for name in ("lint-imports", "mypy", "ruff")}
    script = (ROOT / "scripts" / "test").read_text()
    assert all(Path(program).name in script for program in programs)
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_changelog_has_the_newest_release_below_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    version = newest_release()
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[0] == "Unreleased"
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)", text, re.MULTILINE)) <= kinds
