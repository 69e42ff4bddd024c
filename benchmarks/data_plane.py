"""Measures how fast a data plane reads for a GPU, and how much CPU time that takes.

    python -m benchmarks.data_plane --tokens 8192

A data plane in its own process stages prompts of a model like Llama-3.1-8B, over loopback, from a store in another
process. Cells stay coded (`klt` in `ans`, by a profile that nobody calibrated, about 1.4 bits per value). Then it
stages them again, from `memory_cache`. Each round also receives the same bytes with `http.client`, in one thread, into
memory that is used again: that is what sockets alone take. With many rounds of a short prompt it shows whether the
data plane grows: `--tokens 64 --rounds 20000`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.flat_profile import flat_profile
from benchmarks.processes import main_thread_cpu_s, usage
from benchmarks.report import make_parser, write_json
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, Peer, ReadPages, Setup
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane.fetch.plan import read_units
from sgl_kvfetch.plane.store import WHOLE_SPANS
from sgl_kvfetch.protocol.arena import Line, StagedValues
from sgl_kvfetch.protocol.messages import Found, LookUp, Start
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.wire import Route
from sgl_kvfetch.types import TENSORS

_PAGE_SIZE, _TOKEN_BYTES, _HEAD_DIM = 64, 12 << 10, 128
_TIMEOUT_S = 300.0
_NO_AUDITS = {"audit_share": 0}  # waiting until all is stored asks often, and each time is a hit


@dataclass(frozen=True)
class Round:
    sockets_s: float
    sockets_cpu_s: float
    stage_s: float
    data_plane_cpu_s: float
    event_loop_cpu_s: float  # of it
    store_cpu_s: float
    again_s: float  # from memory
    again_cpu_s: float
    data_plane_rss_bytes: int  # after it
    data_plane_open_files: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.data_plane", __doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt, a power of two")
    parser.add_argument("--rounds", type=int, default=5, help="how many")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvfetch-data-plane-", dir="/dev/shm") as folder:
        coded = _measure(Path(folder), args)
    Console(highlight=False, width=150).print(_table(coded, args))
    if args.json:
        write_json(args.json, {"tokens": args.tokens, "coded": coded})
    return 0


def _measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    profile = flat_profile(0.5)  # about 1.4 bits per value
    profile.save(folder / "profile")
    quantiser = KltQuantiser(profile)
    grid = profile.grid
    namespace = Namespace(
        "benchmark", "dtype=bfloat16", "mha", "bfloat16", _PAGE_SIZE, grid.num_layers, 0, grid.num_heads,
        _HEAD_DIM, _HEAD_DIM, quantiser.identity,
    )  # fmt: skip
    heads = HeadSlice(namespace, range(grid.num_heads))
    hashes = [hashlib.sha256(str(page).encode()).digest() for page in range(args.tokens // _PAGE_SIZE)]
    started: list[DataPlaneProcess] = []

    def launch(line: Line) -> DataPlaneProcess:
        started.append(DataPlaneProcess(line))
        return started[-1]

    with StoreProcess(folder / "store") as store:
        config = {
            "store": store.url, "quantiser": "klt", "profile": str(folder / "profile"), "fetch_timeout_s": _TIMEOUT_S,
            "recompute": "never", "memory_cache": 4 * _TOKEN_BYTES * args.tokens, **_NO_AUDITS,
        }  # fmt: skip
        command = Start(config, namespace, 0, grid.num_heads, 0, None, takes_code=True)
        staging_bytes = len(hashes) * heads.geometry.page_bytes
        cache_bytes = config["memory_cache"]
        setup = Setup(launch, heads.geometry, staging_bytes=staging_bytes, cache_bytes=cache_bytes)
        plane = DataPlane(command, Peer(setup))
        try:
            few = {t: torch.randn(16, _PAGE_SIZE, grid.num_layers, grid.num_heads, _HEAD_DIM) for t in TENSORS}
            few = {t: x.to(torch.bfloat16) for t, x in few.items()}
            write_pages(plane, hashes, lambda tensor, pages: few[tensor][[page % 16 for page in pages]])
            rounds = []
            for _ in range(args.rounds):
                sockets_s, sockets_cpu_s = _receive(store.url, asyncio.run(_reads(store.url, heads, hashes, quantiser)))
                plane.flush()
                pid = started[0].process.pid
                of_store_s, loop_s = usage(store.pid).cpu_s, main_thread_cpu_s(pid)
                num_cells, wire_bytes, stage_s, cpu_s = _timed_stage(plane, hashes, pid)
                loop_s, of_store_s = main_thread_cpu_s(pid) - loop_s, usage(store.pid).cpu_s - of_store_s
                _, _, again_s, again_cpu_s = _timed_stage(plane, hashes, pid)
                after = usage(pid)
                spent_s = stage_s, cpu_s, loop_s, of_store_s, again_s, again_cpu_s
                rounds.append(Round(sockets_s, sockets_cpu_s, *spent_s, after.rss_bytes, after.open_files))
        finally:
            plane.close()
    return {"num_cells": num_cells, "wire_bytes": wire_bytes, "rounds": [asdict(each) for each in rounds]}


async def _reads(
    url: str, heads: HeadSlice, hashes: Sequence[bytes], quantiser: Quantiser
) -> list[tuple[str, int, int]]:
    """Return the objects and ranges that a fetch reads."""
    store = open_remote(url, options=HttpOptions(timeout_s=_TIMEOUT_S))
    reads: list[tuple[str, int, int]] = []
    try:
        for hit in (await store.lookup(heads.folder, hashes)).hits:
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


def _timed_stage(plane: DataPlane, hashes: Sequence[bytes], pid: int) -> tuple[int, int, float, float]:
    """Stage all pages, and release them. Return the number of cells, the bytes of their integers, and the seconds and
    the data plane's CPU seconds that it took."""
    got: list[StagedValues] = []
    cpu_s, begin_s = usage(pid).cpu_s, time.perf_counter()
    work = plane.stage(hashes, got.append)
    while not got:
        plane.step()
        time.sleep(1e-4)
    taken_s, cpu_s = time.perf_counter() - begin_s, usage(pid).cpu_s - cpu_s
    (staged,) = got
    if staged.num_pages < len(hashes) or staged.code is None:
        raise SystemExit(f"only {staged.num_pages} of {len(hashes)} pages were staged, or none is coded")
    plane.unstage(work)
    plane.step()
    return len(staged.code.cells), int(staged.code.chunks["size"].sum()), taken_s, cpu_s


def _table(coded: dict[str, Any], args: argparse.Namespace) -> Table:
    mb, cells, rounds = coded["wire_bytes"] / 1e6, coded["num_cells"], [Round(**each) for each in coded["rounds"]]

    def median(of: Callable[[Round], float]) -> str:
        return f"{statistics.median(map(of, rounds)):.2f}"

    table = Table(title=f"{args.tokens} tokens, {cells} cells, {mb:.0f} MB coded, medians of {len(rounds)}")
    for column in ("", "MB/s", "CPU ms a MB", "CPU ms a cell", "of the event loop, a MB", "of the store, a MB"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("sockets alone", median(lambda r: mb / r.sockets_s), median(lambda r: 1e3 * r.sockets_cpu_s / mb))
    table.add_row(
        "data plane",
        median(lambda r: mb / r.stage_s),
        median(lambda r: 1e3 * r.data_plane_cpu_s / mb),
        median(lambda r: 1e3 * r.data_plane_cpu_s / cells),
        median(lambda r: 1e3 * r.event_loop_cpu_s / mb),
        median(lambda r: 1e3 * r.store_cpu_s / mb),
    )
    table.add_row(
        "from memory",
        median(lambda r: mb / r.again_s),
        median(lambda r: 1e3 * r.again_cpu_s / mb),
        median(lambda r: 1e3 * r.again_cpu_s / cells),
    )
    table.add_row("that, in ms", median(lambda r: 1e3 * r.again_s))
    table.add_row("ratio", median(lambda r: r.sockets_s / r.stage_s))
    early, late = rounds[len(rounds) // 10], rounds[-1]  # until then, threads and their memory are made
    table.caption = (
        f"the data plane since round {len(rounds) // 10 + 1}: "
        f"memory {(late.data_plane_rss_bytes - early.data_plane_rss_bytes) / 2**20:+.1f} MiB to "
        f"{late.data_plane_rss_bytes / 2**20:.0f}, "
        f"open files {late.data_plane_open_files - early.data_plane_open_files:+d} to {late.data_plane_open_files}"
    )
    return table


def write_pages(plane: DataPlane, hashes: Sequence[bytes], pages: ReadPages) -> None:
    """Write pages, and wait until the store has them."""
    first, deadline_s = 0, time.monotonic() + _TIMEOUT_S
    while first < len(hashes):  # it takes as many as there is room for
        before, rest = hashes[first - 1] if first else None, range(first, len(hashes))
        first += plane.write(first, before, hashes[first:], rest, pages)
        if time.monotonic() > deadline_s:
            raise SystemExit("the data plane does not accept pages")
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (found := _find(plane, hashes).num_pages) < len(hashes):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"only {found} of {len(hashes)} pages were stored within {_TIMEOUT_S:g} s")
        time.sleep(0.01)


def _find(plane: DataPlane, hashes: Sequence[bytes]) -> Found:
    return plane.look_up(LookUp(0, b"".join(hashes))).result()


if __name__ == "__main__":
    sys.exit(main())
