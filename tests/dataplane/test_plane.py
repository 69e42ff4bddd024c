"""Tests of a data plane in a separate process, with a store in a directory, including the death of that process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.dataplane.launch import DataPlaneProcess, Line, Running
from sgl_kvfetch.dataplane.messages import Start
from sgl_kvfetch.dataplane.plane import DataPlane, Find
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.fetch.sink import GuardedSink, PagePool
from sgl_kvfetch.quant import CellValues, make_quantiser
from sgl_kvfetch.types import TENSORS, TensorName
from tests.segments import SMALL, make_heads, make_values, page_hashes

WAIT_S = 60.0
NUM_PAGES = 16


class Pool(PagePool):
    """Pages in plain tensors."""

    def __init__(self) -> None:
        shape = NUM_PAGES, SMALL.page_size, SMALL.num_layers, SMALL.num_heads
        self.values = {t: torch.full((*shape, SMALL.head_dim(t)), torch.nan, dtype=SMALL.torch_dtype) for t in TENSORS}

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        for tensor, x in zip(TENSORS, values, strict=True):
            part = self.values[tensor][:, :, layers.start : layers.stop, heads.start : heads.stop]
            part[list(pages)] = x.view(len(pages), SMALL.page_size, *x.shape[1:])

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        return self.values[tensor][list(pages)]


class Launcher:
    """Remembers the processes that it started."""

    def __init__(self) -> None:
        self.started: list[DataPlaneProcess] = []

    def __call__(self, line: Line) -> Running:
        self.started.append(DataPlaneProcess(line))
        return self.started[-1]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.started[-1].process.pid, number)


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture
def plane(tmp_path: Path, launcher: Launcher) -> Iterator[DataPlane]:
    plane = open_plane(tmp_path, launcher)
    yield plane
    plane.close()
    for each in launcher.started:
        assert each.join(WAIT_S)


def open_plane(directory: Path, launcher: Launcher, **config: object) -> DataPlane:
    heads = make_heads(SMALL, make_quantiser("exact"))
    settings = {"store": [f"file://{directory}"], "codec": "zstd"} | config
    return DataPlane(Start(settings, heads.namespace, 0, SMALL.num_heads, 0, None), SMALL, launcher)


def look_up(plane: DataPlane, hashes: Sequence[bytes]) -> Find:
    found: Future[Find] = Future()
    plane.look_up(hashes, found.set_result)
    return found.result(WAIT_S)


def store(plane: DataPlane, hashes: Sequence[bytes]) -> dict[TensorName, torch.Tensor]:
    """Write pages, and wait until they are stored."""
    values = {t: x.view(len(hashes), SMALL.page_size, *x.shape[1:]) for t, x in make_values(SMALL, len(hashes)).items()}

    def read(k: torch.Tensor, v: torch.Tensor) -> bool:
        k.copy_(values["k"])
        v.copy_(values["v"])
        return True

    assert plane.write(0, None, hashes, read, WAIT_S)
    wait_until(lambda: look_up(plane, hashes).num_pages == len(hashes))
    return values


def fetch(plane: DataPlane, hashes: Sequence[bytes], num_rounds: int = 1) -> tuple[int, Pool]:
    """Look up and fetch pages. Return how many were restored, and the pool that holds them."""
    pool, found = Pool(), look_up(plane, hashes)
    ends = [found.num_pages * (i + 1) // num_rounds for i in range(num_rounds)]
    call = plane.fetch(hashes[: found.num_pages], ends, time.monotonic() + WAIT_S, found=found.work)
    for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if call.here[index].result(WAIT_S) is not None:
            plane.give(call, index, Destination(range(first, end), GuardedSink(pool)))
    call.end.result(WAIT_S)
    return sum(over.result(0) for over in call.over), pool


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happens"
        time.sleep(0.01)


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_written_pages_are_fetched_unchanged(plane: DataPlane, num_rounds: int) -> None:
    hashes = page_hashes(NUM_PAGES)
    values = store(plane, hashes)
    num_pages, pool = fetch(plane, hashes, num_rounds)
    assert num_pages == NUM_PAGES
    assert all(torch.equal(pool.values[t], values[t]) for t in TENSORS)
    assert look_up(plane, page_hashes(3, "other")).num_pages == 0
    plane.clear()
    assert look_up(plane, hashes).num_pages == 0


def test_an_impossible_config_is_refused(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match="decode-profile"):
        open_plane(tmp_path, launcher, decode_profile=str(tmp_path / "decode-profile"))
    assert launcher.started[0].join(WAIT_S)
    assert not [t for t in threading.enumerate() if t.name == "kvfetch-data"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_data_plane_that_dies_or_hangs_is_replaced_and_costs_misses(
    plane: DataPlane, launcher: Launcher, number: signal.Signals
) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    found = look_up(plane, hashes)
    call = plane.fetch(hashes, [8, 16], time.monotonic() + WAIT_S, found=found.work)
    assert call.here[0].result(WAIT_S) is not None  # its bytes are here, but it has no destination
    before = metrics.DATA_PLANE_STARTS._value.get()
    launcher.signal(number)
    call.end.result(WAIT_S)
    assert [over.result(0) for over in call.over] == [0, 0]
    wait_until(lambda: len(launcher.started) == 2 and look_up(plane, hashes).num_pages == NUM_PAGES)
    assert metrics.DATA_PLANE_STARTS._value.get() == before + 1
    assert launcher.started[0].join(WAIT_S)
    assert fetch(plane, hashes)[0] == NUM_PAGES
    # Pages that an earlier data plane found cannot be fetched.
    late = plane.fetch(hashes, [16], time.monotonic() + WAIT_S, found=found.work)
    assert late.over[0].result(WAIT_S) == 0


def test_after_random_kills_every_call_ends_and_values_are_right(plane: DataPlane, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    values = store(plane, hashes)
    rng, killed = random.Random(0), threading.Event()

    def kill_now_and_then() -> None:
        for _ in range(3):
            if killed.wait(rng.uniform(0.0, 0.3)):
                return
            process = launcher.started[-1].process
            process.kill()
            wait_until(partial(_is_replaced, launcher, process))
        killed.set()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        while not killed.is_set():
            num_pages, pool = fetch(plane, hashes, rng.randrange(1, 4))
            for tensor in TENSORS:
                assert torch.equal(pool.values[tensor][:num_pages], values[tensor][:num_pages])
    finally:
        killed.set()
        killer.join(WAIT_S)
    wait_until(lambda: fetch(plane, hashes)[0] == NUM_PAGES)


def test_the_gauges_of_a_killed_data_plane_go_with_it(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise SGLang's metrics would show its queue for ever."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(metrics))
    plane = open_plane(tmp_path, launcher)
    try:
        process = launcher.started[0].process
        gauges = metrics / f"gauge_livesum_{process.pid}.db"
        wait_until(gauges.exists)
        process.kill()
        wait_until(lambda: not gauges.exists())
    finally:
        plane.close()


def _is_replaced(launcher: Launcher, process: subprocess.Popen[bytes]) -> bool:
    return launcher.started[-1].process is not process


def test_the_data_plane_ends_with_its_engine(tmp_path: Path) -> None:
    """The engine may end in any way; here it is killed."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.dataplane.test_plane import Launcher, open_plane\n"
        "launcher = Launcher()\nplane = open_plane(Path(sys.argv[1]), launcher)\n"
        "print(launcher.started[0].process.pid, flush=True)\ntime.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert _runs(pid)
        engine.kill()
    wait_until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Return whether a process runs. A zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
