"""What tests and benchmarks rely on: nothing is left running, links are as slow as they say, faults are heard."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from harness.imported_sglang import ImportedSGLang
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.stores.http import HttpStore

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]

# A store behind a slow link, a server in a session of its own with a child of its own, and a temporary folder.
SCRIPT = """
import subprocess, sys, tempfile, time
from harness.children import start_child
from harness.store_process import StoreProcess

SLEEP = "import time; time.sleep(3600)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder, StoreProcess(folder, link_gbps=1):
    start_child([sys.executable, "-c", CHILD], start_new_session=True)
    time.sleep(3600)
"""


def _is_running(process: psutil.Process) -> bool:
    """A zombie has ended: whoever adopted it has not looked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_link(processes: list[psutil.Process]) -> bool:
    """Return whether a slow link is among them, which is the last that `SCRIPT` waits for."""
    try:
        return any("harness.slow_link" in " ".join(process.cmdline()) for process in processes)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_children_and_theirs_end(number: signal.Signals, tmp_path: Path) -> None:
    folders, started = tmp_path / "folders", list[psutil.Process]()
    folders.mkdir()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folders)], cwd=ROOT, stdout=log, stderr=log)
    try:

        def has_started() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            started[:] = psutil.Process(process.pid).children(recursive=True)
            return len(started) == 3 and _has_link(started)

        # Each poll reads about every process of the machine. SGLang is imported several times, one after the other.
        wait_until(has_started, timeout_s=2 * WAIT_S, poll_s=0.1)
        process.send_signal(number)
        assert process.wait(WAIT_S) != 0
        wait_until(lambda: not any(map(_is_running, started)), found=lambda: [*filter(_is_running, started)])
    finally:
        for each in filter(_is_running, started):
            each.kill()
        process.kill()
        process.wait()
    assert not [*folders.iterdir()]
    assert "the store ended by itself" not in (tmp_path / "log").read_text()


def test_a_store_that_ends_by_itself_fails_its_test(tmp_path: Path) -> None:
    message = r"ended by itself with code -9:\n\S+ INFO kvfetch: serving "
    with pytest.raises(RuntimeError, match=message), StoreProcess(tmp_path) as store:  # noqa: PT012
        os.kill(store.pid, signal.SIGKILL)
        os.waitid(os.P_PID, store.pid, os.WEXITED | os.WNOWAIT)


BYTES_PER_S = 12_500_000  # of a link of 0.1 Gbps


async def test_a_store_sends_reads_and_lookups_at_the_links_speed(tmp_path: Path) -> None:
    """All readers together: two that read at once get half of it each."""
    contents = bytes(2_000_000), bytes(1_999_999)
    with StoreProcess(tmp_path, link_gbps=0.1) as process:
        store = HttpStore(process.url)
        for content in contents:
            await store.put(data_object(content), content)
        started = time.monotonic()
        assert await asyncio.gather(*(store.get(data_object(content)) for content in contents)) == [*contents]
        assert time.monotonic() - started > 0.8 * 4_000_000 / BYTES_PER_S
        segment = make_segment(page_hashes(4), 0, 4)
        await put_segment(store, segment)
        await store.close()
    with StoreProcess(tmp_path, link_gbps=0.00001) as process:  # 1,250 bytes a second
        store = HttpStore(process.url)
        started = time.monotonic()
        assert (await store.lookup(FOLDER, page_hashes(4))).num_pages == 4
        assert time.monotonic() - started > 0.8 * len(segment.manifest.encode()) / 1250
        await store.close()


@pytest.fixture
def importer(imported_sglang: ImportedSGLang | None) -> ImportedSGLang:
    if imported_sglang is None:
        pytest.skip("with an accelerator, each process imports SGLang itself")
    return imported_sglang


HOOKED = """
import pkgutil, sys
from types import ModuleType
from sglang.srt.plugins import hook_registry, load_plugins
load_plugins()
hooked = list(map(pkgutil.resolve_name, hook_registry.HookRegistry._patched))
originals = {id(each.__wrapped__) for each in hooked}
modules = [each for each in sys.modules.values() if isinstance(each, ModuleType)]
bindings = [(each.__name__, name, value) for each in modules for name, value in vars(each).items()]
print(len(hooked), [f"{module}.{name}" for module, name, value in bindings if id(value) in originals])
"""


@pytest.mark.sglang
@pytest.mark.slow
def test_hooks_are_found_wherever_their_functions_were_imported(importer: ImportedSGLang, tmp_path: Path) -> None:
    num_hooked, left = importer.run(["-c", HOOKED], tmp_path).stdout.splitlines()[-1].split(" ", 1)
    assert int(num_hooked) > 30
    assert left == "[]"
