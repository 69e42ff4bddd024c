"""One soak: a store, its clients, and what disturbs them; then the checks of what is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.report import distribution
from benchmarks.soak.clients import Busy, Client, read_slowly
from benchmarks.soak.disk import Disk
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.world import World
from harness.store_process import StoreProcess
from sgl_kvfetch.stores.http import HttpStore


@dataclass(frozen=True)
class Sample:
    at_s: float  # monotonic
    pid: int
    rss_bytes: int
    open_files: int
    disk_bytes: int


def take_sample(folder: Path, pid: int) -> Sample:
    """Raises psutil.NoSuchProcess if the store has ended."""
    process = psutil.Process(pid)
    memory, files = process.memory_info().rss, process.num_fds()
    return Sample(time.monotonic(), pid, memory, files, disk_bytes(folder, pid))


def disk_bytes(folder: Path, pid: int | None = None) -> int:
    """Return the size of all files under ``folder``, and of those that a process holds open though they are deleted."""
    sizes: dict[int, int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            _note_size(sizes, Path(path, name))
    if pid is not None:
        for name in _listed(Path(f"/proc/{pid}/fd")):
            link = Path(f"/proc/{pid}/fd/{name}")
            try:
                if os.readlink(link).startswith(str(folder)):
                    _note_size(sizes, link, follow=True)
            except OSError:
                continue  # closed meanwhile
    return sum(sizes.values())


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _note_size(sizes: dict[int, int], path: Path, follow: bool = False) -> None:
    try:
        status = os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return
    sizes[status.st_ino] = status.st_size


def growth(samples: Sequence[Sample], field: str) -> float:
    """Return by how much a field grew: from the median of the first third of the samples to that of the last."""
    third = len(samples) // 3
    if not third:
        return 0.0
    first, last = (statistics.median(getattr(x, field) for x in part) for part in (samples[:third], samples[-third:]))
    return float(last - first)


_NUM_KILLS = 12  # about; fewer in a short run
_NUM_FULL = 12
_SHORTEST_PAUSE_S = 4.0
_FULL_S = (0.5, 4.0)
_DOWN_S = (0.0, 1.0)
_SAMPLE_S = 0.5
_WARM_PART = 0.1  # of a run; memory is compared from then on, counted from the last kill
_MOST_GROWTH_BYTES = 32 << 20
_MOST_GROWTH_FILES = 16
_FILES_OF_THREADS = 48  # that threads open when they first use the catalog, and keep
_SETTLE_S = 60.0
_ORPHAN_AGE_S = 10.0  # at which `kvfetch serve` removes unfinished writes
_SLACK_BYTES = 8 << 20  # that files may exceed the capacity by


@dataclass(frozen=True)
class Settings:
    duration_s: float
    clients: int
    slow_readers: int
    capacity_bytes: int
    longest_lookup_s: float
    fills_disk: bool
    seed: int


class Soak:
    def __init__(self, settings: Settings, world: World, disk: Disk) -> None:
        self._settings = settings
        self._world = world
        self._disk = disk
        self._ledger = Ledger()
        self._samples: list[Sample] = []
        self._store = StoreProcess(
            disk.folder,
            extra_args=["--capacity", f"{settings.capacity_bytes}B"],
            config={"orphan_age_s": _ORPHAN_AGE_S},
        )
        self._store_runs = asyncio.Lock()  # to hold while the store must run, or while it does not

    async def run(self) -> dict[str, Any]:
        """Return the figures and the problems. Raises RuntimeError if the store does not start, or ends by itself."""
        with self._store:
            first = await self._take_sample()
            try:
                await self._disturbed_clients()
            except* RuntimeError as group:
                raise group.exceptions[0] from None
            verified = await self._settle()
            last = await self._take_sample()
            self._judge(first, last, verified)
            return self._results(first, last, verified)

    async def _disturbed_clients(self) -> None:
        settings, stop, busy = self._settings, asyncio.Event(), Busy()
        shared = self._store.port, self._world, self._ledger
        async with asyncio.TaskGroup() as group:
            for number in range(settings.clients):
                group.create_task(Client(number, *shared, busy, settings.seed).run(stop))
            for number in range(settings.slow_readers):
                group.create_task(read_slowly(number, *shared, stop, settings.seed))
            group.create_task(self._kill_now_and_then(stop))
            if settings.fills_disk:
                group.create_task(self._fill_now_and_then(stop))
            group.create_task(self._sample(stop))
            await asyncio.sleep(settings.duration_s)
            stop.set()

    async def _kill_now_and_then(self, stop: asyncio.Event) -> None:
        """Crash the store during the first half."""
        rng = random.Random(f"{self._settings.seed} kills")
        half_s = self._settings.duration_s / 2
        until_s = time.monotonic() + half_s
        while not await _stopped(stop, _pause_s(rng, half_s / _NUM_KILLS)) and time.monotonic() < until_s:
            async with self._store_runs:
                with self._ledger.disturbing("killed"):
                    committed = list(self._ledger.recent)
                    self._store.kill()
                    await asyncio.sleep(rng.uniform(*_DOWN_S))
                    await asyncio.to_thread(self._store.start)
                await self._require_committed(committed)

    async def _require_committed(self, names: list[str]) -> None:
        """Check that the segments committed last have survived a kill."""
        store = HttpStore(self._store.url)
        try:
            for name in names:
                hashes = self._world.segments[name].page_hashes
                found = await store.lookup(name.partition("/")[0], hashes)
                kept = name in self._ledger.recent and not self._ledger.is_disturbed("full")
                if found.num_pages < len(hashes) and kept:
                    self._ledger.problem("a segment that was committed before a kill is lost", name)
        finally:
            await store.close()

    async def _fill_now_and_then(self, stop: asyncio.Event) -> None:
        rng = random.Random(f"{self._settings.seed} full disks")
        while not await _stopped(stop, _pause_s(rng, self._settings.duration_s / _NUM_FULL)):
            with self._ledger.disturbing("full"):
                async with self._store_runs:
                    await asyncio.to_thread(self._disk.fill)
                await _stopped(stop, rng.uniform(*_FULL_S))
                async with self._store_runs:
                    await asyncio.to_thread(self._disk.free)

    async def _sample(self, stop: asyncio.Event) -> None:
        while not await _stopped(stop, _SAMPLE_S):
            self._samples.append(await self._take_sample())

    async def _take_sample(self) -> Sample:
        async with self._store_runs:
            self._store.require_running()
            return await asyncio.to_thread(take_sample, self._disk.folder, self._store.pid)

    async def _settle(self) -> dict[str, Any]:
        """Wait until the store has collected what no segment needs. Return the last report of ``kvfetch verify``."""
        deadline_s = time.monotonic() + _SETTLE_S + 3 * _ORPHAN_AGE_S
        while True:
            verified = await asyncio.to_thread(_verify, self._store.url)
            verified["unaccounted_bytes"] = await self._unaccounted_bytes()
            clean = not verified["orphans"] and verified["unaccounted_bytes"] <= _SLACK_BYTES
            if clean or time.monotonic() > deadline_s:
                return verified
            await asyncio.sleep(1)

    async def _unaccounted_bytes(self) -> int:
        """Return how many bytes of files belong to no object."""
        store = HttpStore(self._store.url)
        try:
            listed = [info.size_bytes async for info in store.list()]
        finally:
            await store.close()
        return disk_bytes(self._disk.folder, self._store.pid) - sum(listed)

    def _judge(self, first: Sample, last: Sample, verified: dict[str, Any]) -> None:
        """Add to the problems what the clients cannot see."""
        settings, problem = self._settings, self._ledger.problem
        if self._ledger.lookups_s and max(self._ledger.lookups_s) > settings.longest_lookup_s:
            problem(f"a lookup took {max(self._ledger.lookups_s):.1f} s")
        over = [s for s in self._samples if s.disk_bytes > settings.capacity_bytes + _SLACK_BYTES]
        if over:
            most = max(s.disk_bytes for s in over)
            problem(
                f"files took {most / 2**20:.0f} MiB; more than allowed in {len(over)} of {len(self._samples)} samples"
            )
        steady = self._steady()
        if (grown := growth(steady, "rss_bytes")) > _MOST_GROWTH_BYTES:
            problem(f"memory grew by {grown / 2**20:.0f} MiB in the second half")
        if (grown := growth(steady, "open_files")) > _MOST_GROWTH_FILES:
            problem(f"open files grew by {grown:.0f} in the second half")
        if last.open_files > first.open_files + _FILES_OF_THREADS:
            problem(f"{last.open_files} open files without clients, {first.open_files} before")
        if verified["exit_code"] != 0:
            problem(f"kvfetch verify: exit code {verified['exit_code']}", f"{verified['problems'][:3]}")
        if verified["orphans"]:
            problem(f"{len(verified['orphans'])} data objects without a manifest are left")
        if verified["unaccounted_bytes"] > _SLACK_BYTES:
            problem(f"files of {verified['unaccounted_bytes']} bytes belong to no object")
        first_text, *tracebacks = self._store.log().split("Traceback")
        for traceback in tracebacks:
            problem("the store's log has a traceback", f"{first_text[-500:]}Traceback{traceback[:3000]}")

    def _steady(self) -> list[Sample]:
        """Return the samples since the last kill, without those during which the store warmed up."""
        since = [s for s in self._samples if s.pid == self._samples[-1].pid]
        return [s for s in since if s.at_s > since[0].at_s + _WARM_PART * self._settings.duration_s]

    def _results(self, first: Sample, last: Sample, verified: dict[str, Any]) -> dict[str, Any]:
        ledger, steady = self._ledger, self._steady()
        outcomes: dict[str, dict[str, int]] = {}
        for (operation, result), count in sorted(ledger.outcomes.items()):
            outcomes.setdefault(operation, {})[result] = count
        return {
            "working_set_bytes": self._world.working_set_bytes,
            "outcomes": outcomes,
            "disturbances": dict(Counter(each.kind for each in ledger.disturbances)),
            "disturbed_s": [
                (each.kind, each.began_s - ledger.started_s, each.ended_s - ledger.started_s)
                for each in ledger.disturbances
            ],
            "lookup_s": distribution(ledger.lookups_s) | {"max": max(ledger.lookups_s, default=None)},
            "most_disk_bytes": max(s.disk_bytes for s in self._samples),
            "growth": {field: growth(steady, field) for field in ("rss_bytes", "open_files", "disk_bytes")},
            "first": dataclasses.asdict(first),
            "last": dataclasses.asdict(last),
            "verified": verified | {"orphans": len(verified["orphans"])},
            "problems": [dataclasses.asdict(each) for each in ledger.problems.values()],
            "log": self._store.log()[-20_000:],
            "samples": [dataclasses.asdict(s) for s in self._samples],
        }


def _pause_s(rng: random.Random, mean_s: float) -> float:
    return rng.uniform(0.5, 1.5) * max(_SHORTEST_PAUSE_S, mean_s)


async def _stopped(stop: asyncio.Event, within_s: float) -> bool:
    """Wait for ``stop``, at most for ``within_s``. Return whether it is set."""
    try:
        async with asyncio.timeout(within_s):
            return await stop.wait()
    except TimeoutError:
        return False


def _verify(url: str) -> dict[str, Any]:
    """Run ``kvfetch verify``. Return its report, and its exit code."""
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "verify", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        report = {"problems": [done.stderr[-2000:]], "orphans": []}
    return report | {"exit_code": done.returncode}
