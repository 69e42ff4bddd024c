"""A process that is asked to end takes with it what the harness started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from harness.children import children_cpu_s, note_cpu_time
from harness.waiting import WAIT_S, wait_until

ROOT = Path(__file__).parents[1]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)

# A store behind a slow link, a server in a session of its own with a child of its own, and a temporary folder.
SCRIPT = """
import subprocess, sys, tempfile, time
from harness.children import start_child
from harness.store_process import StoreProcess

SLEEP = "import time; time.sleep(3600)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder, StoreProcess(folder, link_gbps=[1]):
    start_child([sys.executable, "-c", CHILD], start_new_session=True)
    time.sleep(3600)
"""


def _end_once(
    command: Sequence[str], number: signal.Signals, is_ready: Callable[[list[psutil.Process]], bool], log_path: Path
) -> int:
    """Start a command, and send it a signal when its descendants are ready. Wait until none is left. Return its exit
    code."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    started: list[psutil.Process] = []
    try:

        def has_started() -> bool:
            assert process.poll() is None, log_path.read_text()
            started[:] = psutil.Process(process.pid).children(recursive=True)
            return is_ready(started)

        wait_until(has_started, poll_s=0.1)  # each poll reads about every process of the machine
        process.send_signal(number)
        code = process.wait(WAIT_S)
        wait_until(
            lambda: not any(map(_is_running, started)), timeout_s=10, found=lambda: [*filter(_is_running, started)]
        )
        return code
    finally:
        for each in (*started, process):
            if each.is_running() if isinstance(each, psutil.Process) else each.poll() is None:
                each.kill()
        process.wait()


def _is_running(process: psutil.Process) -> bool:
    """A zombie has ended: whoever adopted it has not looked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _run(commands: list[psutil.Process], *parts: str) -> bool:
    """Return whether, for each of ``parts``, a process runs a command with it."""
    lines = [_command(process) for process in commands]
    return all(any(part in line for line in lines) for part in parts)


@SIGNALS
def test_children_and_theirs_end(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "folders").mkdir()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "folders")]

    def is_ready(started: list[psutil.Process]) -> bool:
        return len(started) == 3 and _run(started, "harness.slow_link")

    assert _end_once(command, number, is_ready, tmp_path / "log") != 0
    assert not [*(tmp_path / "folders").iterdir()]
    assert "the store ended by itself" not in (tmp_path / "log").read_text()


def test_the_cpu_time_of_grandchildren_counts() -> None:
    busy = "while True: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True) as process:
        try:
            found = psutil.Process(process.pid)
            wait_until(lambda: any(each.cpu_times().user > 0.2 for each in found.children()))
            before_s = children_cpu_s()
            note_cpu_time(process.pid)
            assert children_cpu_s() - before_s > 0.2
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.sglang
@pytest.mark.slow
def test_a_benchmark_leaves_nothing_running(tiny_llama: Path, tmp_path: Path) -> None:
    """On Ctrl-C; SIGTERM does the same, as the first test shows."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + i * i % 250}" for i in range(4000)))
    command = [
        *(sys.executable, "-m", "benchmarks.ttft", "--model", str(tiny_llama), "--profile", "none", "--part", "0:1"),
        *("--text", str(text), "--tokens", "512", "--gbps", "1", "--prompts", "2", "--methods", "raw reuse"),
    ]

    def is_ready(started: list[psutil.Process]) -> bool:
        return _run(started, "sglang.launch_server", "sgl_kvfetch.plane", "harness.slow_link")

    assert _end_once(command, signal.SIGINT, is_ready, tmp_path / "log") != 0
