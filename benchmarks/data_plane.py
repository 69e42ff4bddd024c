"""Measures how fast a data plane reads for a GPU and writes, and how much CPU time that takes in each process.

    python -m benchmarks.data_plane --tokens 8192
    python -m benchmarks.data_plane --write

A data plane in its own process, a store in another one, over loopback, all in memory; pages are of Llama-3.1-8B's
shape. This process represents the engine.

* **Reading**: prompts are staged. Cells stay coded (`klt` in `ans`, by a profile that nobody calibrated, about 1.4 bits
  per value). Then they are staged again, from `memory_cache`. Each round also receives the same bytes with
  `http.client`, in one thread, into memory that is used again: that is what sockets alone take.
* **Writing**: exact values, in `ans` and in `raw`. This process reads pages from a pool into shared memory. The clock
  runs until the store finds all pages, for a client of its own: a data plane that looks pages up reads them ahead. CPU
  seconds are given a GB of raw values. The first round is that of a new process, whose memory is fresh; the kernel
  clears each page of it. In the others, it is used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.flat_profile import flat_profile
from benchmarks.heads import make_heads
from benchmarks.report import make_parser, make_table, output_file, whole_number, write_json
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, Peer, Setup
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane.fetch.plan import read_units
from sgl_kvfetch.plane.store import WHOLE_SPANS
from sgl_kvfetch.protocol import Line, StagedValues, StridedPages
from sgl_kvfetch.protocol.messages import Start
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.wire import Route
from sgl_kvfetch.types import TENSORS, KVGeometry

_SHAPE = KVGeometry(32, 8, 128, 128, 64, "bfloat16")
_OWN_PAGES = 16  # that the pool has: pages are copies of them
_TIMEOUT_S, _POLL_S = 300.0, 0.02


@dataclass(frozen=True)
class _Running:
    """A data plane and its store."""

    plane: DataPlane
    process_id: int
    store: StoreProcess
    heads: HeadSlice

    def cpu_s(self) -> tuple[float, float, float]:
        """Return the CPU seconds of this process, the data plane and the store."""
        return time.process_time(), _cpu_s(self.process_id), _cpu_s(self.store.pid)

    def write(self, hashes: Sequence[bytes]) -> None:
        """Write pages, and wait until the store has them."""
        first, deadline_s = 0, time.monotonic() + _TIMEOUT_S
        while first < len(hashes):  # it takes as many as there is room for
            before, rest = hashes[first - 1] if first else None, range(first, len(hashes))
            first += self.plane.write(first, before, hashes[first:], rest, _read_pool)
            if time.monotonic() > deadline_s:
                raise SystemExit("the data plane does not accept pages")
        asyncio.run(_until_stored(self.store.url, self.heads, hashes))


def _cpu_s(process_id: int) -> float:
    """Return the CPU seconds of a process and its children, without those that have ended. In nanoseconds, where /proc
    counts in ticks of 10 ms: by the clock that clock_getcpuclockid(3) names."""
    total_s = time.clock_gettime((~process_id << 3) | 2)
    for child in psutil.Process(process_id).children(recursive=True):
        with suppress(OSError):
            total_s += time.clock_gettime((~child.pid << 3) | 2)
    return total_s


@contextmanager
def _running(coding: Quantiser, staged_pages: int = 0, **config: Any) -> Iterator[_Running]:
    """``staged_pages``: how many fit into the memory for staged prompts; 0 if none are staged."""
    heads, started = make_heads(_SHAPE, coding), list[DataPlaneProcess]()

    def launch(line: Line) -> DataPlaneProcess:
        started.append(DataPlaneProcess(line))
        return started[-1]

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="kvfetch-data-plane-", dir=memory) as folder, StoreProcess(folder) as store:
        settings = {"store": store.url, "fetch_timeout_s": _TIMEOUT_S, **config}
        staging = {"staging_bytes": staged_pages * _SHAPE.page_bytes, "cache_bytes": config.get("memory_cache", 0)}
        start = Start(settings, heads.namespace, 0, _SHAPE.num_heads, 0, None, takes_code=staged_pages > 0)
        plane = DataPlane(start, Peer(Setup(launch, _SHAPE, **staging)))
        try:
            yield _Running(plane, started[0].process.pid, store, heads)
        finally:
            plane.close()


def _hashes(num_tokens: int, label: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{label}{page}".encode()).digest() for page in range(num_tokens // _SHAPE.page_size)]


def _read_pool(pages: Sequence[int], memory: torch.Tensor, offset: int) -> bool:
    return _pool().read_into([page % _OWN_PAGES for page in pages], memory, offset)


@cache
def _pool() -> StridedPages:
    generator = torch.Generator().manual_seed(0)
    shape = _SHAPE.num_layers, _OWN_PAGES, _SHAPE.page_size, _SHAPE.num_heads, _SHAPE.k_head_dim  # as in SGLang's pools
    by_layer = [torch.randn(shape, generator=generator).to(_SHAPE.torch_dtype) for _ in TENSORS]
    return StridedPages([x.permute(1, 2, 0, 3, 4) for x in by_layer])


async def _until_stored(url: str, heads: HeadSlice, hashes: Sequence[bytes]) -> None:
    store, deadline_s = open_remote(url, options=HttpOptions(timeout_s=_TIMEOUT_S)), time.monotonic() + _TIMEOUT_S
    try:
        while (found := (await store.lookup(heads.folder, hashes)).num_pages) < len(hashes):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"only {found} of {len(hashes)} pages were stored within {_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)
    finally:
        await store.close()


@dataclass(frozen=True)
class Read:
    """A round. ``again_s``: from memory."""

    sockets_s: float
    sockets_cpu_s: float
    stage_s: float
    data_plane_cpu_s: float
    store_cpu_s: float
    again_s: float
    again_cpu_s: float


def measure_reads(num_tokens: int, rounds: int) -> tuple[int, int, list[Read]]:
    """Return the number of cells, the bytes of their integers, and the rounds."""
    profile, hashes, found = flat_profile(0.5), _hashes(num_tokens), list[Read]()  # about 1.4 bits per value
    quantiser = KltQuantiser(profile)
    cache_bytes = 4 * len(hashes) * _SHAPE.page_bytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile")
        profile.save(path)
        config = {"quantiser": "klt", "profile": str(path), "recompute": "never", "memory_cache": cache_bytes}
        with _running(quantiser, len(hashes), audit_share=0, **config) as running:
            running.write(hashes)
            for _ in range(rounds):
                reads = asyncio.run(_reads(running, hashes, quantiser))
                sockets = _receive(running.store.url, reads)
                running.plane.flush()
                num_cells, num_bytes, taken_s, plane_s, store_s = _stage(running, hashes)
                _, _, again_s, again_cpu_s, _ = _stage(running, hashes)
                found.append(Read(*sockets, taken_s, plane_s, store_s, again_s, again_cpu_s))
    return num_cells, num_bytes, found


async def _reads(running: _Running, hashes: Sequence[bytes], quantiser: Quantiser) -> list[tuple[str, int, int]]:
    """Return the objects and ranges that a fetch reads."""
    store = open_remote(running.store.url, options=HttpOptions(timeout_s=_TIMEOUT_S))
    reads: list[tuple[str, int, int]] = []
    try:
        for hit in (await store.lookup(running.heads.folder, hashes)).hits:
            reader = SegmentReader(decode_manifest(hit.manifest), quantiser)
            for span in range(reader.manifest.num_spans):
                reads += [read for unit in read_units(reader, span, WHOLE_SPANS) for read in unit.reads]
    finally:
        await store.close()
    return reads


def _receive(url: str, reads: Sequence[tuple[str, int, int]]) -> tuple[float, float]:
    """Receive ranges one after another. Return the seconds and the CPU seconds that this takes."""
    memory = memoryview(bytearray(max(end - start for _, start, end in reads)))
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    for name, start, end in reads:
        connection.request("GET", f"{Route.OBJECTS}/{name}", headers={"Range": f"bytes={start}-{end - 1}"})
        answer, position = connection.getresponse(), 0
        while position < end - start:
            position += answer.readinto(memory[position : end - start])
    taken = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
    connection.close()
    return taken


def _stage(running: _Running, hashes: Sequence[bytes]) -> tuple[int, int, float, float, float]:
    """Stage all pages, and release them. Return the number of cells, the bytes of their integers, and the seconds, the
    data plane's CPU seconds and the store's that it took."""
    got: list[StagedValues] = []
    before, begin_s = running.cpu_s(), time.perf_counter()
    work = running.plane.stage(hashes, got.append)
    while not got:
        running.plane.step()
        time.sleep(1e-4)
    taken_s, (_, plane_s, store_s) = time.perf_counter() - begin_s, _since(before, running.cpu_s())
    (staged,) = got
    if staged.num_pages < len(hashes) or staged.code is None:
        raise SystemExit(f"only {staged.num_pages} of {len(hashes)} pages were staged, or none is coded")
    running.plane.unstage(work)
    running.plane.step()
    return len(staged.code.cells), int(staged.code.chunks["size"].sum()), taken_s, plane_s, store_s


def _since(before: Sequence[float], now: Sequence[float]) -> list[float]:
    return [after - earlier for earlier, after in zip(before, now, strict=True)]


def _reads_table(num_cells: int, num_bytes: int, rounds: Sequence[Read], num_tokens: int) -> Table:
    mb = num_bytes / 1e6

    def median(of: Callable[[Read], float]) -> str:
        return f"{statistics.median(map(of, rounds)):.2f}"

    rows = [
        ("sockets alone", median(lambda r: mb / r.sockets_s), median(lambda r: 1e3 * r.sockets_cpu_s / mb), "", ""),
        (
            "data plane",
            median(lambda r: mb / r.stage_s),
            median(lambda r: 1e3 * r.data_plane_cpu_s / mb),
            median(lambda r: 1e3 * r.data_plane_cpu_s / num_cells),
            median(lambda r: 1e3 * r.store_cpu_s / mb),
        ),
        (
            "from memory",
            median(lambda r: mb / r.again_s),
            median(lambda r: 1e3 * r.again_cpu_s / mb),
            median(lambda r: 1e3 * r.again_cpu_s / num_cells),
            "",
        ),
        ("that, in ms", median(lambda r: 1e3 * r.again_s), "", "", ""),
        ("ratio", median(lambda r: r.sockets_s / r.stage_s), "", "", ""),
    ]
    title = f"{num_tokens} tokens, {num_cells} cells, {mb:.0f} MB coded, medians of {len(rounds)}"
    return make_table(title, ("", "MB/s", "CPU ms a MB", "CPU ms a cell", "of the store, a MB"), rows)


@dataclass(frozen=True)
class Written:
    """A round. CPU seconds are a GB of raw values."""

    codec: str
    round: int
    raw_mb_per_s: float
    engine_cpu_s_per_gb: float
    data_plane_cpu_s_per_gb: float
    store_cpu_s_per_gb: float


def measure_writes(codec: str, num_tokens: int, rounds: int) -> Iterator[Written]:
    """Write ``num_tokens`` of new pages in each round."""
    _pool()
    with _running(make_quantiser("exact"), codec=codec) as running:
        for number in range(1, rounds + 1):
            hashes = _hashes(num_tokens, f"{number} ")
            raw_gb = len(hashes) * _SHAPE.page_bytes / 1e9
            before, begin_s = running.cpu_s(), time.perf_counter()
            running.write(hashes)
            taken_s, spent_s = time.perf_counter() - begin_s, _since(before, running.cpu_s())
            yield Written(codec, number, 1e3 * raw_gb / taken_s, *(each / raw_gb for each in spent_s))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.data_plane", __doc__)
    parser.add_argument("--write", action="store_true", help="measure writing, else reading")
    parser.add_argument("--tokens", type=whole_number, default=8192, help="of a prompt, a power of two")
    parser.add_argument("--rounds", type=whole_number, default=5, help="how many")
    parser.add_argument("--json", type=output_file, help="where to write the figures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds: list[Any]
    if args.write:
        rounds = [each for codec in ("ans", "raw") for each in measure_writes(codec, args.tokens, args.rounds)]
        cells = []
        for codec, number, mb_per_s, *cpu_s in (vars(each).values() for each in rounds):
            cells.append((codec, str(number), f"{mb_per_s:.0f}", *(f"{x:.2f}" for x in cpu_s)))
        title = f"{args.tokens} tokens a round; CPU seconds a GB of raw values"
        table = make_table(title, ("codec", "round", "MB/s", "engine", "data plane", "store"), cells)
    else:
        num_cells, num_bytes, rounds = measure_reads(args.tokens, args.rounds)
        table = _reads_table(num_cells, num_bytes, rounds, args.tokens)
    Console(highlight=False, width=120).print(table)
    if args.json:
        write_json(args.json, {"tokens": args.tokens, "rounds": [asdict(each) for each in rounds]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
