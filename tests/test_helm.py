"""The Helm chart: linted, and what it makes checked against Kubernetes' schemas and the store's own options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sgl_kvfetch import __version__
from tests.tools.conftest import kvfetch

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "kvfetch"
KUBERNETES = ("1.25", "1.33")
LEAST = {"image": "registry/kvfetch:1", "tokenSecret": "tokens"}
ALL = {"tlsSecret": "tls", "storageClassName": "fast", "serviceMonitor.enabled": "true", "options": "{--max-uploads=8}"}

helm = shutil.which("helm")
pytestmark = pytest.mark.skipif(helm is None, reason="needs helm, as in the extra `dev`")


def run(*args: str, **values: str) -> subprocess.CompletedProcess[str]:
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return subprocess.run([str(helm), *args, *settings], capture_output=True, text=True, check=False)


def rendered(**values: str) -> dict[str, dict[str, Any]]:
    """Return the chart's resources by kind."""
    found = run("template", "kv", str(CHART), **values)
    assert found.returncode == 0, found.stderr
    return {resource["kind"]: resource for resource in yaml.safe_load_all(found.stdout)}


@pytest.mark.parametrize("values", [LEAST, LEAST | ALL])
def test_helm_finds_nothing_wrong(values: dict[str, str]) -> None:
    found = run("lint", "--strict", str(CHART), **values)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [LEAST, LEAST | ALL])
def test_kubernetes_accepts_the_resources(values: dict[str, str], version: str) -> None:
    resources = rendered(**values)
    assert set(resources) == {"StatefulSet", "Service"} | ({"ServiceMonitor"} if "tlsSecret" in values else set())
    for kind, resource in resources.items():
        if kind != "ServiceMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("values", [LEAST, LEAST | ALL])
def test_the_store_understands_its_options(values: dict[str, str]) -> None:
    (container,) = rendered(**values)["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert kvfetch(*container["args"], "--help").exit_code == 0
    assert kvfetch(*container["args"], "--unknown", "--help").exit_code == 2


@pytest.mark.parametrize("missing", ["image", "tokenSecret"])
def test_what_is_missing_is_named(missing: str) -> None:
    found = run("template", "kv", str(CHART), **{key: value for key, value in LEAST.items() if key != missing})
    assert found.returncode != 0
    assert f"{missing}: name" in found.stderr


def test_the_chart_has_the_package_s_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
