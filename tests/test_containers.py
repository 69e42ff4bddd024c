"""The store's image, built by buildah on a Debian root in the place of the base image, which is in a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.store_process import StoreProcess

ROOT = Path(__file__).parent.parent
TOOLS = ("buildah", "mmdebstrap")
# So that pip reaches the index in the build as it does here.
OF_THIS_MACHINE = [name for name in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf") if Path(name).exists()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs buildah and mmdebstrap (Debian's packages)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


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
        run(*build, "--tag=localhost/kvfetch", f"--file={ROOT / 'deploy' / 'Containerfile'}", str(ROOT))
        yield run("buildah", "from", "localhost/kvfetch")


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
