"""Tests of a data plane in a separate process, including its death."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import msgspec
import pytest
import torch

from harness.children import state_of
from harness.metrics import own_metric
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch import metrics
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine import data_plane as plane_module, process as run_module
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, EndedError, Peer, Quantising, ReadPages, Running, Setup
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.protocol import messages as channel_module, messages as m
from sgl_kvfetch.protocol.arena import Line, SharedPool, StagedValues, StridedPages
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.protocol.messages import Found, Staged, Start
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.stores.notes import publish_profile
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.plugin.planes import start_by_uint8
from tests.reasons import assert_counted
from tests.segments import SMALL, make_heads, make_values, page_hashes, using
from tests.stores.test_profiles import NO_KEYS, WEIGHTS, save

pytestmark = pytest.mark.process

NUM_PAGES = 16
WATCH = m.Watch(WEIGHTS, "/model", "model", m.ProfileNeeds(KVGeometry(1, 1, 8, 8, 4, "bfloat16"), (0,), 0, 0, 1))
POOL = SharedPool.create(SMALL, NUM_PAGES)  # pages are fetched to it


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
def plane(url: str, launcher: Launcher) -> Iterator[DataPlane]:
    plane = open_plane(url, launcher)
    yield plane
    plane.close()
    for each in launcher.started:
        assert each.join(WAIT_S)


def open_plane(url: str, launcher: Launcher, *, staging_bytes: int = 0, **config: object) -> DataPlane:
    setup = Setup(launcher, SMALL, staging_bytes=staging_bytes, pool_files=POOL.files)
    return DataPlane(start_of(url, **config), Peer(setup))


def start_of(url: str, **config: object) -> Start:
    heads = make_heads(SMALL, make_quantiser("exact"))
    patient = {"lookup_timeout_s": 600, "fetch_timeout_s": 600, "recompute": "never"}  # on slow machines, too
    no_audits = {"audit_share": 0}  # which hits they cut is drawn
    settings = {"store": url, "codec": "zstd"} | patient | no_audits | config
    return Start(settings, heads.namespace, 0, SMALL.num_heads, 0, None, pool=POOL.places)


def read_ahead(hashes: Sequence[bytes]) -> m.LookUp:
    return m.LookUp(0, b"".join(hashes))


def all_of(hashes: Sequence[bytes], timeout_s: float = WAIT_S) -> m.FetchPages:
    return m.FetchPages(0, b"".join(hashes), tuple(range(len(hashes))), time.monotonic() + timeout_s)


def look_up(plane: DataPlane, hashes: Sequence[bytes]) -> Found:
    return plane.look_up(read_ahead(hashes)).result(WAIT_S)


def store(plane: DataPlane, hashes: Sequence[bytes]) -> None:
    assert write(plane, hashes) == len(hashes)
    wait_until(lambda: look_up(plane, hashes).num_pages == len(hashes))


def write(plane: DataPlane, hashes: Sequence[bytes]) -> int:
    """Queue pages for writing. Return how many were queued."""
    values = page_values(len(hashes))
    return plane.write(0, None, hashes, range(len(hashes)), reading(values))


def reading(values: Mapping[TensorName, torch.Tensor]) -> ReadPages:
    return StridedPages([values[tensor] for tensor in TENSORS]).read_into


def page_values(num_pages: int) -> dict[TensorName, torch.Tensor]:
    return {t: x.view(num_pages, SMALL.page_size, *x.shape[1:]) for t, x in make_values(SMALL, num_pages).items()}


def fetch(plane: DataPlane, hashes: Sequence[bytes]) -> int:
    return fetch_found(plane, hashes[: look_up(plane, hashes).num_pages])


def assert_fetched(plane: DataPlane, hashes: Sequence[bytes]) -> None:
    assert fetch(plane, hashes) == len(hashes)
    written = page_values(len(hashes))
    assert all(torch.equal(view[: len(hashes)], written[t]) for t, view in zip(TENSORS, POOL.views, strict=True))


def fetch_found(plane: DataPlane, hashes: Sequence[bytes]) -> int:
    for view in POOL.views:
        view.fill_(float("nan"))
    return plane.fetch(all_of(hashes)).over.result(WAIT_S).num_pages


def test_nothing_is_written_after_a_fetch_was_ended(plane: DataPlane, launcher: Launcher) -> None:
    """Its pages may then be another request's."""
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    for _ in range(20):
        fetch_ended = plane.fetch(all_of(hashes))
        fetch_ended.end()
        assert fetch_ended.over.done()
        for view in POOL.views:
            view.fill_(0.0)
        look_up(plane, hashes)
        assert not any(view.any() for view in POOL.views)
    assert_fetched(plane, hashes)


def test_a_data_plane_that_does_not_end_a_fetch_is_ended(
    plane: DataPlane, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "_END_S", 0.1)
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    launcher.signal(signal.SIGSTOP)
    stopped = plane.fetch(all_of(hashes))
    stopped.end()
    assert stopped.over.result(0).num_pages == 0
    assert launcher.started[0].join(0)
    wait_until(lambda: fetch(plane, hashes) == NUM_PAGES)


def test_pages_of_too_many_hashes_for_a_message_are_a_miss(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    monkeypatch.setattr(m, "_MOST_BYTES", 32 * NUM_PAGES)
    staged: Future[StagedValues] = Future()
    with assert_counted("lookup", Reason.TOO_LARGE):
        assert look_up(plane, hashes) == Found(ANY, reason=Reason.TOO_LARGE)
    with assert_counted("fetch", Reason.TOO_LARGE):
        assert fetch_found(plane, hashes) == 0
        plane.stage(hashes, staged.set_result)
    assert (staged.result(0).num_pages, staged.result(0).reason) == (0, Reason.TOO_LARGE)
    assert fetch(plane, hashes[:8]) == 8


def test_clearing_a_rank_clears_its_heads_of_other_tp_sizes(plane: DataPlane, url: str, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    namespace, geometry = make_heads(SMALL, make_quantiser("exact")).namespace, replace(SMALL, num_heads=1)
    with closing(DataPlane(Start({"store": url}, namespace, 1, 2, 0, None), Peer(Setup(launcher, geometry)))) as half:
        assert look_up(half, hashes).num_pages == NUM_PAGES
        half.clear()
        assert look_up(half, hashes).num_pages == look_up(plane, hashes).num_pages == 0


@pytest.mark.parametrize("is_fault", [False, True])
def test_writing_ends_at_pages_that_are_gone_or_cannot_be_read(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch, is_fault: bool
) -> None:
    monkeypatch.setattr(plane_module, "PART_BYTES", 4 * SMALL.page_bytes)
    values = page_values(10)

    def read(pages: Sequence[int], memory: torch.Tensor, offset: int) -> bool:
        if pages[0] >= 4 and is_fault:
            raise RuntimeError("no device")
        return pages[0] < 4 and reading(values)(pages, memory, offset)

    def dropped() -> list[float]:
        results = "dropped_full", "dropped_error"
        return [own_metric("sgl_kvfetch_written_pages_total", result=result) for result in results]

    full, failed = dropped()
    with assert_counted("write", Reason.INTERNAL) if is_fault else nullcontext():
        assert plane.write(0, None, page_hashes(10), range(10), read) == 4
    assert dropped() == [full + 6 * (not is_fault), failed + 6 * is_fault]
    wait_until(lambda: not plane._peer._room._taken)


def test_all_pieces_share_one_deadline(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for room. And SGLang's scheduler ends if its thread for writing does not stop within 10 s."""
    now_s, waits_s = 100.0, []

    def write_slowly(*args: Any) -> bool:
        nonlocal now_s
        now_s += 2.5
        waits_s.append(args[-1])
        return True

    monkeypatch.setattr(plane_module, "PART_BYTES", 4 * SMALL.page_bytes)
    monkeypatch.setattr(plane_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(plane._peer, "write", write_slowly)
    assert write(plane, page_hashes(10)) == 8
    assert waits_s == [1.0, 0.0]


@pytest.mark.parametrize("why", ["refused", "exact", "large"])
def test_pages_that_do_not_come_quantised_come_as_values(plane: DataPlane, why: str) -> None:
    """Because a value is not finite, as where all tokens are exact, and with integers that take more than values."""
    hashes, values = page_hashes(4), page_values(4)
    token_bytes = SMALL.page_bytes // SMALL.page_size

    def into(pages: range, memory: torch.Tensor, offset: int) -> list[torch.Tensor] | None:
        assert why != "large"
        return None if why == "refused" else [torch.zeros(4 * SMALL.page_bytes, dtype=torch.uint8)]

    quantising = Quantising((token_bytes if why == "large" else 1,), into)
    assert plane.write(0, None, hashes, range(4), reading(values), quantising=quantising) == 4
    wait_until(lambda: look_up(plane, hashes).num_pages == 4)
    assert_fetched(plane, hashes)
    wait_until(lambda: not plane._peer._room._taken)


def test_a_profile_is_taken_before_a_data_plane_serves(
    url: str, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And errors, which it outlives, are those of the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = using(open_remote(url), lambda store: publish_profile(store, save(tmp_path), NO_KEYS))
    digest = name.partition("/")[2]
    launched = Peer(Setup(launcher, SMALL, pool_files=POOL.files))
    config = parse_config({"store": url, "quantiser": "klt"})
    taken = launched.take_profile(config, WATCH)
    assert taken is not None
    assert taken.digest == load_profile(Path(taken.path)).digest == digest
    assert launched.take_profile(config, WATCH, "0" * 32) is None  # as another rank may have chosen
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1") as down:
        launched.take_profile(config.model_copy(update={"store": "http://127.0.0.1:1"}), WATCH)
    assert down.value.reason == "refused"
    plane = DataPlane(start_of(url), launched)
    store(plane, page_hashes(NUM_PAGES))
    plane.close()
    assert len(launcher.started) == 1


def test_a_start_that_is_refused_or_ends(url: str, tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match="token-file"):
        open_plane(url, launcher, token_file=str(tmp_path / "token-file"))
    launched = Peer(Setup(launcher, SMALL))
    launcher.signal(signal.SIGKILL)
    with pytest.raises(EndedError):
        launched.take_profile(parse_config({"store": url}), WATCH)
    launched.end()
    assert all(each.join(WAIT_S) for each in launcher.started)
    assert not [t for t in threading.enumerate() if t.name == "kvfetch-data"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_data_plane_that_dies_or_hangs_is_replaced_and_costs_misses(
    plane: DataPlane, launcher: Launcher, number: signal.Signals
) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    wait_until(lambda: plane._peer._num_queued == 0)
    before = own_metric("sgl_kvfetch_data_plane_restarts_total")
    launcher.signal(signal.SIGSTOP)  # so that the fetch is under way when the data plane ends
    over = plane.fetch(all_of(hashes)).over
    launcher.signal(number)
    assert over.result(WAIT_S).num_pages == 0
    wait_until(lambda: len(launcher.started) >= 2 and look_up(plane, hashes).num_pages == NUM_PAGES)
    assert own_metric("sgl_kvfetch_data_plane_restarts_total") == before + 1
    assert launcher.started[0].join(WAIT_S)
    assert plane.num_losses == 0  # what is written is not lost
    assert fetch(plane, hashes) == NUM_PAGES


class _Nobody:
    """Stands for a data plane, and serves nothing."""

    def __init__(self) -> None:
        self.peer = Peer(Setup(self._launch, SMALL, queue_bytes=1 << 20, staging_bytes=1 << 20))

    def _launch(self, line: Line) -> Running:
        self.line = line
        return self

    def kill(self) -> None:
        self.line.commands.close()
        self.line.staged.close()

    def join(self, timeout_s: float) -> bool:
        return True

    def is_busy(self) -> bool:
        return False


@pytest.mark.parametrize("in_steps", [False, True])
def test_invalid_bytes_instead_of_an_answer_end_the_data_plane(in_steps: bool) -> None:
    nobody = _Nobody()
    asked = nobody.peer.ask(m.Stage(1, b""), Staged(1))
    if in_steps:
        nobody.line.staged.sendall(m.encode(m.Pong()))
        nobody.peer.step()
        assert nobody.line.staged.fileno() == -1
    else:
        nobody.line.commands.sendall(b"\0\0\0\0")
        nobody.peer.serve(threading.Event())
    nobody.peer.end()
    assert asked.result().num_pages == 0


def test_a_launch_that_fails_leaves_no_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_files() -> int:
        gc.collect()  # maps have files of their own
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError))
    before = num_files()
    with pytest.raises(BlockingIOError):
        Peer(Setup(DataPlaneProcess, SMALL))
    assert num_files() == before


def test_pages_that_are_lost_with_a_data_plane_are_counted(launcher: Launcher) -> None:
    dropped = metrics.WRITTEN_PAGES.labels("dropped_data_plane")._value
    before = dropped.get()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a store that never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        plane = open_plane(url, launcher, fetch_timeout_s=600)
        assert write(plane, page_hashes(NUM_PAGES)) == NUM_PAGES
        launcher.signal(signal.SIGKILL)
        wait_until(lambda: dropped.get() == before + NUM_PAGES and plane.num_losses == 1)
        plane.close()
    assert dropped.get() == before + NUM_PAGES


def test_the_next_data_plane_is_told_what_the_last_one_was(
    plane: DataPlane, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    encode = m.encode
    monkeypatch.setattr(channel_module, "encode", lambda message: told.append(message) or encode(message))  # type: ignore[func-returns-value]
    plane.show_prompts([[b"prompt"]])
    plane.pause_calibration(is_paused=True)
    plane.pause_calibration(is_paused=False)
    told.clear()
    launcher.signal(signal.SIGKILL)
    wait_until(lambda: len(launcher.started) >= 2 and write(plane, page_hashes(1)) == 1)
    kinds = m.ShowPrompts, m.PauseCalibration
    assert [each for each in told if isinstance(each, kinds)] == [
        m.ShowPrompts(((b"prompt",),)),
        m.PauseCalibration(False),
    ]


@pytest.mark.parametrize(("is_busy", "num_ticks"), [(False, 3), (True, 9)])
def test_a_start_has_more_time_while_it_does_something(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool, num_ticks: int
) -> None:
    """Importing torch takes long on a busy machine."""
    monkeypatch.setattr(run_module, "_START_TICKS", (2, 8))
    monkeypatch.setattr(run_module, "_TICK_S", 0.01)
    nobody = _Nobody()
    asked: list[None] = []
    monkeypatch.setattr(nobody, "is_busy", lambda: asked.append(None) or is_busy)  # type: ignore[func-returns-value]
    with pytest.raises(EndedError, match="did not start"):
        nobody.peer.start(start_of("http://nowhere"), threading.Event())
    nobody.peer.end()
    assert len(asked) == num_ticks


def test_a_data_plane_that_has_nothing_to_do_answers(plane: DataPlane, launcher: Launcher) -> None:
    time.sleep(1.5 * run_module._RUNNING_TICKS[0] * run_module._TICK_S)
    assert launcher.started[0].process.poll() is None, "it was taken for one that hangs"


def test_a_process_is_busy_until_it_is_stopped(plane: DataPlane, launcher: Launcher) -> None:
    process = launcher.started[0]
    wait_until(lambda: not process.is_busy())  # without work it only waits
    look_up(plane, page_hashes(1))
    assert process.is_busy()
    launcher.signal(signal.SIGSTOP)
    wait_until(lambda: not process.is_busy())


def test_a_switch_writes_what_is_queued_and_finds_nothing_of_the_former_quantiser(
    url: str, launcher: Launcher, plane: DataPlane
) -> None:
    hashes, others = page_hashes(NUM_PAGES), page_hashes(NUM_PAGES, "other")
    store(plane, hashes)
    restarts, losses = own_metric("sgl_kvfetch_data_plane_restarts_total"), plane.num_losses
    plane.show_prompts([[b"prompt"]])
    assert write(plane, others) == NUM_PAGES
    plane.switch(lambda _: start_by_uint8(plane))
    assert plane.num_losses == losses + 1
    assert look_up(plane, hashes) == Found(ANY, reason=Reason.DATA_PLANE)  # at once, while it ends
    assert fetch_found(plane, hashes) == 0
    assert write(plane, hashes) == 0
    store_again(plane, hashes)
    assert launcher.started[0].join(WAIT_S)
    assert plane._told == {}
    assert own_metric("sgl_kvfetch_data_plane_restarts_total") == restarts
    launcher.signal(signal.SIGKILL)
    wait_until(lambda: look_up(plane, hashes).num_pages == NUM_PAGES)  # the next one has the same quantiser
    former = open_plane(url, launcher)
    assert look_up(former, others).num_pages == NUM_PAGES
    former.close()


def store_again(plane: DataPlane, hashes: Sequence[bytes]) -> None:
    """Store pages by what serves after a switch, as soon as it does."""
    wait_until(lambda: write(plane, hashes) == len(hashes))
    wait_until(lambda: look_up(plane, hashes).num_pages == len(hashes))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("when", ["before", "after", "while the next one starts"])
def test_a_data_plane_that_dies_or_hangs_at_the_switch(
    launcher: Launcher, plane: DataPlane, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, when: str
) -> None:
    monkeypatch.setattr(run_module, "_LEAVING_TICKS", (2, 80))
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    if when != "after":
        launcher.signal(number)
    if when == "while the next one starts":
        wait_until(lambda: len(launcher.started) >= 2)  # which is started by the former quantiser
    plane.switch(lambda _: start_by_uint8(plane))
    if when == "after":
        launcher.signal(number)
    store_again(plane, hashes)
    assert plane._start == start_by_uint8(plane)


def test_a_switch_goes_on_until_a_data_plane_serves(
    launcher: Launcher, plane: DataPlane, caplog: pytest.LogCaptureFixture
) -> None:
    """After a store that does not give the profile, a config that is refused, and a process that dies."""
    asked: list[None] = []

    def make(_: Peer) -> Start:
        asked.append(None)
        if len(asked) == 1:
            raise StoreError("refused", "no profile for now")
        start = start_by_uint8(plane)
        return msgspec.structs.replace(start, version=0) if len(asked) == 2 else start

    plane.switch(make)
    wait_until(lambda: len(launcher.started) >= 4)
    launcher.signal(signal.SIGKILL)
    store_again(plane, page_hashes(NUM_PAGES))
    assert "the data plane did not start: no profile for now" in caplog.text
    assert "expected message version" in caplog.text
    assert len(launcher.started) == 5


def test_a_data_plane_that_is_closed_during_a_switch_starts_none(
    url: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "CLOSE_S", 0.1)  # the thread still waits for the store
    plane, asked, closed = open_plane(url, launcher), threading.Event(), threading.Event()

    def make(_: Peer) -> Start:
        asked.set()
        assert closed.wait(WAIT_S)
        return start_by_uint8(plane)

    plane.switch(make)
    assert asked.wait(WAIT_S)
    plane.close()
    closed.set()
    plane._thread.join(WAIT_S)
    assert all(each.join(0) for each in launcher.started)


def test_the_gauges_of_a_killed_data_plane_go_with_it(
    url: str, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise SGLang's metrics would show its queue for ever."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(metrics))
    with closing(open_plane(url, launcher)):
        process = launcher.started[0].process
        gauges = metrics / f"gauge_livesum_{process.pid}.db"
        wait_until(gauges.exists)
        process.kill()
        wait_until(lambda: not gauges.exists())


def test_the_data_plane_ends_with_its_engine() -> None:
    """The engine may end in any way; here it is killed."""
    code = (
        "import time\nfrom tests.engine.test_data_plane import Launcher, open_plane\n"
        "launcher = Launcher()\nplane = open_plane('http://nowhere', launcher)\n"
        "print(launcher.started[0].process.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.kill()
    wait_until(lambda: state_of(pid) in ("Z", "gone"))
