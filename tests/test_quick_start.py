"""The quick start of docs/index.md, command by command, as somebody would type it into one shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import real_model
from harness.engine import free_port
from tests.test_wheel import build_wheel

ROOT = Path(__file__).parents[1]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.mark.timeout(900)
def test_the_quick_start(tmp_path: Path) -> None:
    """All commands as written, with these differences:

    * The wheel is installed beside the tests' own environment, which has the rest: SGLang would take gigabytes.
    * The model is the same, from a package and not from Hugging Face.
    * The servers have free ports.
    """
    if not real_model.is_available():
        pytest.skip("needs the model of scripts/requirements-model.txt")
    page = (ROOT / "docs" / "index.md").read_text()
    script = "\n".join(_BLOCK.findall(page[page.index("## Quick start") : page.index("## Next")]))
    ports = {"8700": str(free_port()), "30000": str(free_port())}
    for step, replacement in (
        ("python3 -m venv .venv\n. .venv/bin/activate\n", ""),
        ("pip install ", f"{sys.executable} -m pip install --quiet --no-deps --target installed "),
        (MODEL, str(real_model.real_model())),
        ("kvfetch serve ", f"kvfetch serve --port {ports['8700']} "),
        ("sglang serve ", f"sglang serve --port {ports['30000']} "),
    ):
        assert script.count(step) == 1
        script = script.replace(step, replacement)
    for port, free in ports.items():
        script = script.replace(f":{port}", f":{free}")

    (tmp_path / "build").mkdir()
    shutil.copy(build_wheel(tmp_path / "build"), tmp_path)
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    printed, log = tmp_path / "printed", tmp_path / "log"
    with printed.open("wb") as stdout, log.open("wb") as stderr:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            shell.wait()
        finally:
            os.killpg(shell.pid, signal.SIGKILL)  # both servers
    output = printed.read_text()
    failure = output[-5000:] + log.read_text()[-5000:]
    (stored,) = re.findall(r"(\d+) pages; stored: (\d+) in ", output) or pytest.fail(failure)
    assert stored[0] == stored[1]
    (cached,) = re.findall(r'"cached_tokens":(\d+)', output) or pytest.fail(failure)
    assert int(cached) >= 64 * (int(stored[0]) - 1) > 256
    hits = re.findall(r'^sgl_kvfetch_lookup_pages_total\{.*result="hit".*\} ([0-9.]+)', output, re.MULTILINE)
    assert [float(count) for count in hits] == [float(stored[0])], failure
