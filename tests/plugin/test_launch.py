"""Tests with real processes: which launches stop at start, and which are left alone.

`sglang serve` imports SGLang as its commands do, while plugins are loaded. For the others it is imported before.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from harness.imported_sglang import ImportedSGLang
from harness.models import make_tiny_llama
from sgl_kvfetch.plugin.versions import WITH_LINKER, installed_version

pytestmark = pytest.mark.sglang

Run = Callable[..., subprocess.CompletedProcess[str]]

INSTALLED = importlib.metadata.version("sglang")
KVFETCH = ["--hicache-storage-backend", "kvfetch"]
HOST_MODE = [*KVFETCH, "--enable-hierarchical-cache", "--hicache-storage-backend-extra-config"]
NO_MODEL = ["--model-path", "/no/such/model", "--device", "cpu"]

# Pretends another version of SGLang, then does what SGLang does with a command line.
OTHER_VERSION = """
import sys
from sgl_kvfetch.plugin import seams, versions
installed = versions.table_version()
seams.table_version = lambda: installed
versions.SGLANG_VERSIONS = ("9.9.8", "9.9.9")
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
print("backend", prepare_server_args(sys.argv[1:]).hicache_storage_backend)
"""


@pytest.fixture
def run(imported_sglang: ImportedSGLang | None, tmp_path: Path) -> Run:
    """Runs Python with a command line, and what is to be in its environment."""
    if imported_sglang is not None:
        return partial(imported_sglang.run, folder=tmp_path)
    return lambda command, **env: _run([sys.executable, *command], tmp_path, **env)


def _run(command: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_wrong_config_key_stops_the_command_with_one_message(tmp_path: Path) -> None:
    config = json.dumps({"store": "http://127.0.0.1:1", "codek": "hevc"})
    done = _run([str(Path(sys.executable).with_name("sglang")), "serve", *NO_MODEL, *HOST_MODE, config], tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.fullmatch("sgl_kvfetch: .*'codek'.*'hevc'.*'codec'.*", done.stderr.strip().splitlines()[-1])
    assert "/no/such/model" not in done.stderr


def test_an_engine_raises_our_error_to_its_caller(run: Run) -> None:
    script = """
import sglang
from sgl_kvfetch.errors import ConfigError
try:
    sglang.Engine(
        model_path="/no/such/model", device="cpu", enable_hierarchical_cache=True,
        hicache_storage_backend="kvfetch", hicache_storage_backend_extra_config='{"store": "nowhere"}',
    )
except ConfigError as error:
    print("raised", error)
"""
    done = run(["-c", script])
    assert done.returncode == 0, done.stderr
    assert "raised" in done.stdout
    assert "nowhere" in done.stdout


def test_another_sglang_runs_if_the_environment_names_it_or_another_backend_is_chosen(run: Run) -> None:
    command = ["-c", OTHER_VERSION, *NO_MODEL, *HOST_MODE, "{}"]
    refused = run(command, KVFETCH_SGLANG="0.5.1")
    assert refused.stderr.strip().splitlines()[-1] == (
        f"sgl_kvfetch: found sglang {INSTALLED}, expected 9.9.8 or 9.9.9 "
        f"(KVFETCH_SGLANG={INSTALLED} in the environment tries it at your own risk)"
    )
    let_through = run(command, KVFETCH_SGLANG=INSTALLED)
    assert "found sglang" not in let_through.stderr
    assert "'store'" in let_through.stderr.strip().splitlines()[-1]  # which the config lacks
    assert f"kvfetch was not tested with sglang {INSTALLED}" in let_through.stderr

    left_alone = run(["-c", OTHER_VERSION, *NO_MODEL, "--hicache-storage-backend", "file"])
    assert left_alone.returncode == 0, left_alone.stderr
    assert left_alone.stdout.split() == ["backend", "file"]


# Hides what the extra `codec` brings, then does what SGLang does with a command line, and in a scheduler's first steps.
WITHOUT_PACKAGES = """
import sys
from importlib.machinery import PathFinder
hidden = {"av", "cryptography", "zstandard"}
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
print("backend", args.hicache_storage_backend)
from types import SimpleNamespace
from sgl_kvfetch.plugin.hooks import measure_prompts, step_profile
measure_prompts(None, SimpleNamespace(tree_cache=None), None, None)
step_profile(None, None)
"""


def test_a_launch_without_our_backend_needs_none_of_our_packages(run: Run, tiny_llama: Path) -> None:
    model = ["--model-path", str(tiny_llama), "--device", "cpu", "--attention-backend", "torch_native"]
    done = run(["-c", WITHOUT_PACKAGES, *model])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "None"


# Resolves several command lines in one process.
PAGE_SIZES = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args
common, *lines = json.loads(sys.argv[1])
for line in lines:
    args = prepare_server_args(common + line)
    args.resolve_once()
    print(resolved_view(args).page_size)
"""


def test_pages_have_64_tokens_where_nobody_chooses(run: Run, tmp_path: Path) -> None:
    ours = [*KVFETCH, "--hicache-storage-backend-extra-config", json.dumps({"store": "http://nowhere"})]
    host = [*ours, "--enable-hierarchical-cache"]
    device = ours if installed_version() in WITH_LINKER else host
    sizes = {
        "64": [device, host],
        "16": [[*device, "--page-size", "16"]],
        "1": [
            [],
            [*device, "--page-size", "1"],
            [*device, "--chunked-prefill-size", "100"],
            [*host, "--disaggregation-mode", "prefill"],
        ],
    }
    common = ["--model-path", str(make_tiny_llama(tmp_path / "model")), "--device", "cpu"]
    common += ["--attention-backend", "torch_native"]
    lines = json.dumps([common, *(line for several in sizes.values() for line in several)])
    done = run(["-c", PAGE_SIZES, lines])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [size for size, several in sizes.items() for _ in several]
