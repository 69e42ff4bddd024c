"""A machine that has only what a store needs: the wheel without extras, which brings deploy/requirements-store.txt.

The environment is a real one. Making it takes 16 seconds on two cores. It shows what is missing; blocked imports would
only show what this test expects to be missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

from harness.engine import free_port
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.tools.app import COMMANDS
from tests.conftest import ROOT, pip
from tests.segments import make_segment
from tests.tools.conftest import KEYS, flip, put
from tests.tools.test_pin import store_pages

pytestmark = pytest.mark.slow
INSTALL = re.compile(r"(/\S+/python) -m pip install '\.\[codec\]' in a checkout")
REQUIREMENTS = ROOT / "deploy" / "requirements-store.txt"

# Each command's arguments and exit code, and what it says. Words in capitals are replaced (`words` below). S3, texts
# and `bench` need packages or servers that a store's machine lacks.
RUNS: dict[str, tuple[str, int, str]] = {
    "serve": ("FILE/store --port PORT", 2, "cannot make FILE/store"),  # the tests serve by it
    "estimate": ("--model CONFIG --link 10Gbps --prefill-tps 8000", 0, "exact"),
    "bench": ("--server http://127.0.0.1:1 --flush", 2, "no SGLang server answers there"),
    "compare": ("--server http://127.0.0.1:1", 2, "no SGLang server answers there"),
    "inspect": ("STORE", 0, "stored in all"),
    "verify": ("STORE", 0, "nothing was decoded, only compared with digests: numpy is not installed here"),
    "encode": ("STORE", 2, "encode needs torch, which is not installed here"),
    "reindex": ("s3://bucket --index redis://127.0.0.1:1", 2, "pip install '.[s3]' in a checkout"),
    "gc": ("ALONE --dry-run", 0, "would delete 0 segments"),
    "clear": ("STORE --dry-run", 0, "2 segments"),
    "pin": ("STORE", 0, "no pins"),
    "calibrate": ("--model m --text FILE --out OUT", 2, "calibrate needs torch, which is not installed here"),
    "profile": ("list STORE", 0, "no profiles"),
    "doctor": ("STORE --store-only", 0, "the store can be used from here"),
    "why": ("STORE --prompt [1]", 1, "never_written"),
}


@pytest.fixture(scope="module")
def kvfetch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program ``kvfetch`` of the environment."""
    folder = tmp_path_factory.mktemp("store-only")
    venv.create(folder / "venv")
    scripts = folder / "venv" / "bin"
    python = ("--python", str(scripts / "python"))
    pip(*python, "install", "--quiet", "--require-hashes", "-r", str(REQUIREMENTS))
    pip(*python, "install", "--quiet", "--no-deps", str(wheel))
    pip(*python, "check")  # the wheel needs nothing else
    return str(scripts / "kvfetch")


@pytest.fixture(autouse=True)
def _only_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def run(kvfetch: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kvfetch, *args], capture_output=True, text=True, timeout=120)


def test_the_wheel_brings_what_the_list_has_and_no_more(kvfetch: str) -> None:
    python = Path(kvfetch).with_name("python")
    listing = [sys.executable, "-m", "pip", "--python", str(python), "list", "--format", "json"]
    found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    installed = {f"{each['name'].lower().replace('_', '-')}=={each['version']}" for each in json.loads(found)}
    listed = {
        line.split(" ")[0].lower().replace("_", "-") for line in REQUIREMENTS.read_text().splitlines() if "==" in line
    }
    assert {each for each in installed if not each.startswith("sgl-kvfetch==")} == listed


def test_every_command_runs_or_says_what_to_install(kvfetch: str, tmp_path: Path) -> None:
    assert RUNS.keys() == COMMANDS.keys()
    folder, alone = tmp_path / "store", tmp_path / "alone"
    store_pages(alone, 8, range(2))  # that no store serves
    store_pages(folder, 8, range(2))
    put(folder, make_segment(num_pages=1, codec="zstd")[0])
    config, file = tmp_path / "config.json", tmp_path / "file"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}))
    file.write_text("text")
    with StoreProcess(folder, command=[kvfetch]) as store:
        words = {
            "STORE": store.url,
            "ALONE": str(alone),
            "CONFIG": str(config),
            "FILE": str(file),
            "OUT": str(tmp_path / "out"),
            "PORT": str(free_port()),
        }

        with urllib.request.urlopen(f"{store.url}/page.js") as answer:
            assert answer.status == 200

        def filled(text: str) -> str:
            return re.sub("|".join(words), lambda found: words[found[0]], text)

        for command, (args, exit_code, said) in RUNS.items():
            done = run(kvfetch, command, *map(filled, args.split()))
            output = done.stdout + done.stderr
            assert done.returncode == exit_code, f"{command}: {output}"
            assert filled(said) in output, f"{command}: {output}"
            assert "Traceback" not in output, f"{command}: {output}"
            if exit_code == 2:
                assert done.stderr.startswith("kvfetch: "), output
                assert done.stderr.count("\n") == 1, output
            if "not installed here" in output and command != "doctor":
                (python,) = INSTALL.findall(output)
                assert Path(python).parent == Path(kvfetch).parent


def test_verify_compares_with_digests(kvfetch: str, tmp_path: Path) -> None:
    """Also encrypted segments with their key: without torch, nothing is decrypted."""
    root, key_file = tmp_path / "store", tmp_path / "keys"
    key_file.write_text("6b" * 32)
    segment = secure_segment(make_segment(num_pages=4)[0], KEYS)
    put(root, segment)
    command = ("verify", str(root), "--json", "--key-file", str(key_file))
    report = json.loads(run(kvfetch, *command).stdout)
    assert (report["num_segments"], report["num_locked"], report["missing_package"]) == (1, 0, "numpy")
    assert report["problems"] == []
    flip(root / segment.data_name, len(segment.data) // 2)
    done = run(kvfetch, *command)
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem == {"name": segment.data_name, "what": "its bytes do not match the digest in its name"}
