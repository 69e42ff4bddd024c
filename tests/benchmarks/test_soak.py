from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import main
from benchmarks.soak.clients import Busy, Client
from benchmarks.soak.disk import LimitedFiles, limited_files, small_disk
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.watch import Sample, disk_bytes, growth
from benchmarks.soak.world import World, WrongError
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.base import SegmentHit
from sgl_kvfetch.stores.http import HttpStore


@pytest.fixture(scope="module")
def world() -> World:
    """One pair of prompts."""
    return World(1, seed=0)


def test_every_page_is_in_segments_of_several_lengths(world: World) -> None:
    one, other = world.prompts
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 4 + [False] * 4
    for prompt in world.prompts:
        for page_hash in prompt:
            holding = [s for s in world.segments.values() if page_hash in s.page_hashes]
            assert {len(segment.page_hashes) for segment in holding} == {2, 4, 8}


def test_a_hit_must_be_what_was_written(world: World) -> None:
    segment = next(s for s in world.segments.values() if len(s.page_hashes) == 8)
    for version in segment.versions:
        assert world.version_of(SegmentHit(version.manifest, 2, 3), segment.page_hashes[2:]) is version
    with pytest.raises(WrongError, match="other pages"):
        world.version_of(SegmentHit(segment.versions[0].manifest, 1, 3), segment.page_hashes[2:])
    with pytest.raises(WrongError, match="other pages"):
        world.version_of(SegmentHit(segment.versions[0].manifest, 6, 3), segment.page_hashes[6:])
    with pytest.raises(WrongError, match="nobody wrote"):
        world.version_of(SegmentHit(b"KVFM", 0, 1), segment.page_hashes)


def test_only_a_disturbance_excuses_an_error() -> None:
    ledger = Ledger()
    before_s = ledger.started_s
    with ledger.disturbing("killed"):
        ledger.note_error("write", StoreError("refused", "no connection"), before_s)
        ledger.note_error("write", StoreError("full", "no room"), before_s)
    ended_s = ledger.disturbances[0].ended_s
    with ledger.disturbing("full"):
        ledger.note_error("replace", StoreError("full", "no room"), before_s)
        ledger.note_error("list", StoreError("full", "no room"), before_s)
    ledger.note_error("write", StoreError("truncated", "began in time"), ended_s - 1)
    ledger.note_error("read", StoreError("timeout", "began later"), ended_s + 1)
    assert [(problem.what, problem.example) for problem in ledger.problems.values()] == [
        ("write: full", "no room"),
        ("list: full", "no room"),
        ("read: timeout", "began later"),
    ]
    assert ledger.outcomes["write", "truncated"] == 1


def sample(at_s: float, rss_bytes: int) -> Sample:
    return Sample(at_s, 1, rss_bytes, 10, 0)


def test_growth_ignores_outliers_and_sees_a_leak() -> None:
    noise = itertools.cycle([0, 3, -2, 1])
    steady = [sample(t, 1000 + next(noise) + (5000 if t % 9 == 0 else 0)) for t in range(100)]
    leaking = [sample(s.at_s, s.rss_bytes + 2 * int(s.at_s)) for s in steady]
    assert abs(growth(steady, "rss_bytes")) < 10
    assert growth(leaking, "rss_bytes") == pytest.approx(200, abs=10)
    assert growth(steady[:2], "rss_bytes") == 0


def test_deleted_files_count_while_they_are_open(tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    kept.write_bytes(bytes(100))
    with gone.open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        assert disk_bytes(tmp_path, os.getpid()) == 1100
        gone.unlink()
        assert disk_bytes(tmp_path, os.getpid()) == 1100
        assert disk_bytes(tmp_path) == 100
    assert disk_bytes(tmp_path, os.getpid()) == 100


def write_file(folder: Path) -> bool:
    """Write a file of a MiB. Return False if there is no room."""
    folder.mkdir(exist_ok=True)
    try:
        (folder / "file").write_bytes(bytes(1 << 20))
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return False
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_small_disk_is_full_until_it_is_freed() -> None:
    try:
        with small_disk(8 << 20) as disk:
            disk.fill(os.getpid())
            assert not write_file(disk.folder)
            disk.free(os.getpid())
            assert write_file(disk.folder)
    except subprocess.CalledProcessError:
        pytest.skip("this root may not mount a file system")


def test_a_limit_on_files_looks_like_a_full_disk(tmp_path: Path) -> None:
    script = "import sys\nfor line in sys.stdin:\n  try: open(sys.argv[1], 'wb').write(bytes(1 << 20)); print('done')\n"
    script += "  except OSError as e: print(e.errno)\n  sys.stdout.flush()"
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    with (
        limited_files() as disk,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer,
    ):
        assert writer.stdin is not None
        assert writer.stdout is not None

        def write() -> str:
            print(file=writer.stdin, flush=True)
            return writer.stdout.readline().strip()

        assert write() == "done"
        disk.fill(writer.pid)
        assert write() == str(errno.EFBIG)
        disk.free(writer.pid)
        assert write() == "done"
        writer.stdin.close()


class StoppingLedger(Ledger):
    """Stops the client after a number of hits, or at the first problem."""

    def __init__(self, hits: int) -> None:
        super().__init__()
        self.stop = asyncio.Event()
        self._hits = hits

    def note(self, operation: str, result: str) -> None:
        super().note(operation, result)
        if self.outcomes["read", "hit"] >= self._hits:
            self.stop.set()

    def problem(self, what: str, example: str = "") -> None:
        super().problem(what, example)
        self.stop.set()


async def run_client(root: Path, world: World, hits: int) -> Ledger:
    ledger = StoppingLedger(hits)
    async with running_server(ServerConfig(root, port=0)) as server, asyncio.timeout(120):
        await Client(0, server.port, world, ledger, Busy(), seed=0).run(ledger.stop)
    return ledger


async def test_a_client_finds_no_fault_in_a_good_store(tmp_path: Path, world: World) -> None:
    ledger = await run_client(tmp_path, world, hits=20)
    assert not ledger.problems
    assert ledger.outcomes["write", "done"] > 0


async def put_everything(root: Path, world: World) -> None:
    store = LocalStore(root)
    for segment in world.segments.values():
        for version in segment.versions:
            await store.put(version.data_name, version.data)
        await store.put(segment.name, segment.versions[0].manifest)
    await store.close()


def damage_all_data(root: Path) -> None:
    for path in root.rglob("*.kvd"):
        with path.open("r+b") as file:
            file.write(b"wrong")


async def test_a_client_notices_wrong_data(tmp_path: Path, world: World) -> None:
    await put_everything(tmp_path, world)
    damage_all_data(tmp_path)
    ledger = await run_client(tmp_path, world, hits=1000)
    assert "differ" in ledger.problems["read: wrong"].example


async def test_a_client_notices_hits_without_data(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_everything(tmp_path, world)

    async def nothing(*args: object) -> None:
        return None

    monkeypatch.setattr(HttpStore, "read", nothing)
    monkeypatch.setattr(HttpStore, "head", nothing)
    ledger = await run_client(tmp_path, world, hits=1000)
    assert "data are gone" in ledger.problems["read: wrong"].example


def test_a_store_that_ends_by_itself_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(self: LimitedFiles, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(LimitedFiles, "fill", end)
    sizes = ["--minutes", "1", "--clients", "1", "--slow-readers", "1", "--capacity", "1"]
    assert main([*sizes, "--disk", "limit", "--seed", "1"]) == 1
    assert "ended by itself" in capsys.readouterr().out
