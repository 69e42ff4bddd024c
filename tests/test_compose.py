"""``deploy/compose.yaml`` and the files that it mounts, as far as they can be checked without a registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.tools.conftest import kvfetch

DEPLOY = Path(__file__).parent.parent / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
MOUNTS = {
    target: DEPLOY / source
    for service in SERVICES.values()
    for source, target in (volume.split(":")[:2] for volume in service["volumes"])
    if source.startswith("./")
}


def test_the_store_understands_its_options() -> None:
    assert kvfetch(*SERVICES["store"]["command"], "--help").exit_code == 0
    assert kvfetch(*SERVICES["store"]["command"], "--unknown", "--help").exit_code == 2


def test_all_mounted_files_are_there() -> None:
    assert len(MOUNTS) == 5
    assert all(source.is_file() for source in MOUNTS.values())
    build = SERVICES["store"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_programs_find_the_mounted_files() -> None:
    prometheus = yaml.safe_load(MOUNTS["/etc/prometheus/prometheus.yml"].read_text())
    assert set(prometheus["rule_files"]) <= set(MOUNTS)
    dashboards = yaml.safe_load(MOUNTS["/etc/grafana/provisioning/dashboards/files.yml"].read_text())
    (provider,) = dashboards["providers"]
    assert MOUNTS[f"{provider['options']['path']}/sgl_kvfetch.json"] == DEPLOY / "grafana.json"


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
def test_promtool_accepts_the_configuration() -> None:
    config = MOUNTS["/etc/prometheus/prometheus.yml"]
    done = subprocess.run(["promtool", "check", "config", "--syntax-only", str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
