"""``deploy/``, as far as it can be checked without a registry: `compose.yaml` and the files that it mounts, systemd's
unit, and the store's image, which buildah builds on a Debian root in the place of the base image."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.store_process import StoreProcess
from tests.tools.conftest import kvfetch

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
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


def test_programs_find_the_mounted_files() -> None:
    build = SERVICES["store"]["build"]
    assert all(source.is_file() for source in (*MOUNTS.values(), DEPLOY / build["context"] / build["dockerfile"]))
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


UNIT = DEPLOY / "kvfetch.service"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def analyze(*args: str) -> None:
    done = subprocess.run(["systemd-analyze", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


@needs_systemd
def test_systemd_accepts_the_unit_and_it_exposes_little(tmp_path: Path) -> None:
    command = shutil.which("kvfetch")
    assert command is not None
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvfetch/bin/kvfetch", command))
    analyze("verify", "--man=no", str(unit))
    analyze("security", "--offline=yes", "--threshold=20", str(UNIT))  # tenths; 96 without any hardening


TOOLS = ("buildah", "mmdebstrap")
# So that pip reaches the index in the build as it does here.
OF_THIS_MACHINE = [name for name in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf") if Path(name).exists()]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A container of the store's image."""
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder, "storage.conf")
        storage.write_text(f'[storage]\ndriver="vfs"\nrunroot="{folder}/run"\ngraphroot="{folder}/graph"\n')
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
        monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
        debian = str(Path(folder, "debian.tar"))
        run("mmdebstrap", "--variant=essential", "--include=python3-venv,python3-dev,g++", "bookworm", debian)
        base = run("buildah", "from", "scratch")
        run("buildah", "add", base, debian, "/")
        run("buildah", "commit", "--rm", base, "localhost/base")
        volumes = [f"--volume={name}:{name}:ro" for name in OF_THIS_MACHINE]
        bases = [f"--build-arg={name}=localhost/base" for name in ("BASE", "BUILD_BASE")]
        build = ["buildah", "bud", "--format=docker", *bases, *volumes]
        run(*build, "--tag=localhost/kvfetch", f"--file={DEPLOY / 'Containerfile'}", str(ROOT))
        yield run("buildah", "from", "localhost/kvfetch")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs buildah and mmdebstrap (Debian's packages)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_stores_image_serves_as_a_user_without_rights(container: str) -> None:
    config = json.loads(run("buildah", "inspect", container))["Docker"]["config"]
    assert config["Cmd"][:2] == ["serve", "/data"]
    in_container = ["buildah", "run", "--env=KVFETCH_TOKEN=secret", container, "--"]
    assert run(*in_container, "id", "-u") == "10001"
    command = [*in_container, *config["Entrypoint"]]
    with StoreProcess("/data", command=command, extra_args=config["Cmd"][2:]) as store:
        health = [part.replace("8700", str(store.port)) for part in config["Healthcheck"]["Test"][1:]]
        run(*in_container, *health)
    refused = subprocess.run([*in_container, *health], capture_output=True, check=False)
    assert refused.returncode != 0
