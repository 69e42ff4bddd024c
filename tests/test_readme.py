"""The README's blocks of commands, as somebody would type them in a checkout."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from harness.engine import free_port, other_models
from harness.waiting import polls, wait_until
from tests.conftest import copy_sources
from tests.shell_blocks import ROOT, Shell, blocks_of, installing, replaced, running
from tests.tools.conftest import kvfetch

pytestmark = pytest.mark.process

FIRST_HIT, CALIBRATE, TWO_COMMANDS = blocks_of((ROOT / "README.md").read_text())
MACHINE = re.compile(r"^# on ", re.MULTILINE)  # where the block goes on on another machine
ON_CPU = re.compile(r'^on_cpu="(.*?)"', re.DOTALL | re.MULTILINE)
TOKENS = list(range(3, 515))  # eight pages of 64; SGLang looks up no prompt of fewer than 256


def run(script: str, folder: Path, name: str) -> None:
    """Run a script to its end."""
    with running(script, folder, name, folder / "installed") as shell:
        assert shell.process.wait() == 0, shell.tail()


def wait_for(url: str, shell: Shell) -> None:
    """Wait until a server answers."""
    for _ in polls():
        assert shell.process.poll() is None, shell.tail()
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            continue
        return
    pytest.fail(shell.tail())


def test_git_does_not_take_the_token() -> None:
    """The first block is typed in a checkout."""
    made = re.findall(r">(\w+)\)", FIRST_HIT)
    assert made == ["token"]
    assert {f"/{name}" for name in made} <= {*(ROOT / ".gitignore").read_text().splitlines()}


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_install_serve_and_store(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block, on one machine without a GPU, with these differences:

    * The package is installed beside the tests' own environment, which has SGLang.
    * MODEL and STORE are a small model and this machine. The store's folder and the ports are the test's own.
    * SGLang gets the quick start's flags for a CPU.
    """
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", other_models(str(tiny_llama)))  # saves imports
    copy_sources(tmp_path)
    install, store, sglang = MACHINE.split(FIRST_HIT)
    ports = free_port(), free_port()
    on_cpu = " ".join(ON_CPU.findall((ROOT / "docs" / "index.md").read_text())[0].split())
    run(replaced(install, [("pip install ", installing("installed"))]), tmp_path, "install")
    assert (tmp_path / "installed" / "sgl_kvfetch").is_dir()

    mine = [("/var/cache/kv", str(tmp_path / "kv")), ("kvfetch serve ", f"kvfetch serve --port {ports[0]} ")]
    theirs = [
        ("MODEL", str(tiny_llama)),
        ("STORE:8700", f"127.0.0.1:{ports[0]}"),
        ("sglang serve ", f"sglang serve --port {ports[1]} {on_cpu} "),
    ]
    url, server = (f"http://127.0.0.1:{port}" for port in ports)
    with running(replaced(f"# {store}", mine), tmp_path, "store", tmp_path / "installed") as serving:
        wait_for(f"{url}/healthz", serving)
        assert (tmp_path / "token").stat().st_mode & 0o077 == 0
        with running(replaced(f"# {sglang}", theirs), tmp_path, "sglang", tmp_path / "installed") as answering:
            wait_for(f"{server}/health", answering)
            body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}}
            request = urllib.request.Request(
                f"{server}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request).close()
            why = ("why", url, "--server", server, "--prompt", str(TOKENS), "--token-file", str(tmp_path / "token"))
            wait_until(lambda: kvfetch(*why).exit_code == 0, found=lambda: kvfetch(*why).output + answering.tail())
            assert "8 pages are stored and sound" in kvfetch(*why).output
        assert "wants a token" in kvfetch("inspect", url).stderr
