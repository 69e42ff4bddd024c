"""Measures how fast pages come through the data plane, and how much CPU time that takes in the engine's process.

    python -m benchmarks.data_plane --json out.json

Prefixes are stored with one codec. Then a data plane in its own process fetches them together, over loopback, from a
store in another process. This process represents the engine: it copies values from shared memory into a pool. Each
round also reads the same bytes in this process with only the store's client, which shows the limit of store, sockets
and client on this machine. With `raw` nothing has to be decoded, so the two can be compared. CPU seconds are per GB of
K and V, for the engine's process, the data plane's and the store's.

`--coded` stages prompts for a GPU instead: cells of a model like Llama-3.1-8B stay coded (`klt` in `ans`, by a profile
that nobody calibrated, about 1.4 bits a value). Then it stages them again, from `memory_cache`. Each round also
receives the same bytes with `http.client`, in one thread, into memory that is used again: that is what sockets alone
take. With many rounds of a short prompt it shows whether the data plane grows: `--coded --tokens 64 --rounds 20000`.

`--security none tls encrypted` also measures a store that speaks TLS, and chunks that AES-256-GCM encrypts.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import trustme
from rich.console import Console
from rich.table import Table

from benchmarks.flat_profile import flat_profile
from benchmarks.machine import machine, versions
from benchmarks.processes import main_thread_cpu_s, usage
from benchmarks.report import write_json
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.protect import open_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, ReadPages
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane.fetch.plan import ReadSize, ReadUnit, read_units
from sgl_kvfetch.plane.store import READ_SIZE, WHOLE_SPANS
from sgl_kvfetch.protocol.arena import Line, SharedPool, StagedValues
from sgl_kvfetch.protocol.messages import FetchPages, Found, Stage, Start
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.keyed import with_keys
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.stores.remote import HttpOptions, TlsFiles
from sgl_kvfetch.stores.wire import Route
from sgl_kvfetch.types import TENSORS, TensorName

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 6, 8, 128
QUANTISER: Final = "uint8"
_CODED_PAGE_SIZE, _CODED_TOKEN_BYTES = 64, 12 << 10
SECURITY = ("none", "tls", "encrypted")
_TIMEOUT_S = 300.0
_NO_AUDITS = {"audit_share": 0}  # waiting until all is stored asks often, and each time is a hit


@dataclass(frozen=True)
class Round:
    client_s: float
    fetch_s: float
    engine_cpu_s: float
    data_plane_cpu_s: float
    store_cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)
    console = Console(highlight=False, width=150)
    rows = []
    if args.coded:
        with tempfile.TemporaryDirectory(prefix="kvfetch-data-plane-", dir="/dev/shm") as folder:
            coded = _measure_coded(Path(folder), args)
        console.print(_coded_table(coded, args))
        if args.json:
            write_json(args.json, {"tokens": args.tokens, "coded": coded, "machine": machine(), "versions": versions()})
        return 0
    for codec, security in product(args.codecs.split(","), args.security):
        with console.status(codec), tempfile.TemporaryDirectory(prefix="kvfetch-data-plane-") as folder:
            rows.append(_measure(codec, security, Path(folder), args))
    console.print(_table(rows, args))
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        write_json(args.json, {**settings, "codecs": rows, "machine": machine(), "versions": versions()})
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--coded", action="store_true", help="stage cells that stay coded")
    parser.add_argument("--codecs", default="raw,zstd,hevc", help="(default: %(default)s)")
    parser.add_argument("--security", nargs="+", choices=SECURITY, default=["none"], help="(default: none)")
    parser.add_argument("--prefixes", type=int, default=4, help="fetched together (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="per prefix, a power of two (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="to the store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    return parser.parse_args(argv)


def _measure(codec: str, security: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    namespace = Namespace(
        "benchmark", "dtype=auto", "mha", "bfloat16", PAGE_SIZE, LAYERS, 0, HEADS, HEAD_DIM, HEAD_DIM,
        make_quantiser(QUANTISER).identity,
    )  # fmt: skip
    heads = HeadSlice(namespace, range(HEADS))
    num_pages = args.tokens // PAGE_SIZE
    prefixes = [_hashes(prefix, num_pages) for prefix in range(args.prefixes)]
    started: list[DataPlaneProcess] = []

    def launch(line: Line) -> DataPlaneProcess:
        started.append(DataPlaneProcess(line))
        return started[-1]

    extra_args, ca_file, secure = _secure(security, folder)
    keys = StoreKeys.read(secure.get("key_file"))
    with StoreProcess(folder / "store", extra_args=extra_args, ca_file=ca_file) as store:
        config = {
            **secure,
            "store": store.url,
            "quantiser": QUANTISER,
            "codec": codec,
            "max_connections": args.connections,
            "fetch_timeout_s": _TIMEOUT_S,
            "recompute": "never",
            **_NO_AUDITS,
        }
        pool = SharedPool.create(heads.geometry, num_pages * args.prefixes)
        start = Start(config, namespace, 0, HEADS, 0, None, pool=pool.places)
        plane = DataPlane(start, heads.geometry, launch, pool_files=pool.files)
        try:
            _store(plane, prefixes, heads)
            rounds, sizes = [], set()
            for _ in range(args.rounds):
                client_s, wire_bytes = asyncio.run(
                    _read_alone(store.url, ca_file, keys, heads, prefixes, args.connections)
                )
                sizes.add(wire_bytes)
                begin_s, engine_s = time.perf_counter(), time.process_time()
                data_plane_s, store_s = usage(started[0].process.pid).cpu_s, usage(store.pid).cpu_s
                _fetch(plane, prefixes)
                rounds.append(
                    Round(
                        client_s,
                        time.perf_counter() - begin_s,
                        time.process_time() - engine_s,
                        usage(started[0].process.pid).cpu_s - data_plane_s,
                        usage(store.pid).cpu_s - store_s,
                    )
                )
        finally:
            plane.close()
    (wire_bytes,) = sizes
    raw_gb = args.prefixes * num_pages * heads.geometry.page_bytes / 1e9
    return {"codec": codec, "security": security} | _row(rounds, raw_gb, wire_bytes / 1e9)


@dataclass(frozen=True)
class Coded:
    """One round of `--coded`."""

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


def _measure_coded(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    profile = flat_profile(0.5)  # about 1.4 bits a value
    profile.save(folder / "profile")
    quantiser = KltQuantiser(profile)
    grid = profile.grid
    namespace = Namespace(
        "benchmark", "dtype=bfloat16", "mha", "bfloat16", _CODED_PAGE_SIZE, grid.num_layers, 0, grid.num_heads,
        HEAD_DIM, HEAD_DIM, quantiser.identity,
    )  # fmt: skip
    heads = HeadSlice(namespace, range(grid.num_heads))
    hashes = _hashes(0, args.tokens // _CODED_PAGE_SIZE)
    started: list[DataPlaneProcess] = []

    def launch(line: Line) -> DataPlaneProcess:
        started.append(DataPlaneProcess(line))
        return started[-1]

    with StoreProcess(folder / "store") as store:
        config = {
            "store": store.url, "quantiser": "klt", "profile": str(folder / "profile"), "fetch_timeout_s": _TIMEOUT_S,
            "recompute": "never", "memory_cache": 4 * _CODED_TOKEN_BYTES * args.tokens, **_NO_AUDITS,
        }  # fmt: skip
        command = Start(config, namespace, 0, grid.num_heads, 0, None, takes_code=True)
        staging_bytes = len(hashes) * heads.geometry.page_bytes
        plane = DataPlane(command, heads.geometry, launch, staging_bytes=staging_bytes)
        try:
            few = {t: torch.randn(16, _CODED_PAGE_SIZE, grid.num_layers, grid.num_heads, HEAD_DIM) for t in TENSORS}
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
                rounds.append(Coded(sockets_s, sockets_cpu_s, *spent_s, after.rss_bytes, after.open_files))
        finally:
            plane.close()
    return {"num_cells": num_cells, "wire_bytes": wire_bytes, "rounds": [asdict(each) for each in rounds]}


async def _reads(
    url: str, heads: HeadSlice, hashes: Sequence[bytes], quantiser: Quantiser
) -> list[tuple[str, int, int]]:
    """Return the objects and ranges that a fetch reads."""
    store = open_remote(url, options=HttpOptions(timeout_s=_TIMEOUT_S))
    try:
        units = await find_units(store, heads, hashes, quantiser, WHOLE_SPANS)
    finally:
        await store.close()
    return [read for unit in units for read in unit.reads]


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


def _coded_table(coded: dict[str, Any], args: argparse.Namespace) -> Table:
    mb, cells, rounds = coded["wire_bytes"] / 1e6, coded["num_cells"], [Coded(**each) for each in coded["rounds"]]

    def median(of: Callable[[Coded], float]) -> str:
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


def _secure(security: str, folder: Path) -> tuple[Sequence[str], Path | None, dict[str, Any]]:
    """Make the files. Return the store's arguments, its CA and the config keys."""
    if security == "encrypted":
        (folder / "key").write_text("0f" * 32)
        return (), None, {"key_file": str(folder / "key")}
    if security == "none":
        return (), None, {}
    authority, ca, server = trustme.CA(), folder / "ca.pem", folder / "server.pem"
    authority.cert_pem.write_to_path(ca)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(server)
    return ("--tls-cert", str(server), "--tls-key", str(server)), ca, {"tls": {"ca_file": str(ca)}}


def _row(rounds: Sequence[Round], raw_gb: float, wire_gb: float) -> dict[str, Any]:
    shares = [r.engine_cpu_s / (r.engine_cpu_s + r.data_plane_cpu_s) for r in rounds]
    return {
        "raw_gb": raw_gb,
        "wire_gb": wire_gb,
        "client_alone_wire_gb_per_s": statistics.median(wire_gb / r.client_s for r in rounds),
        "fetch_wire_gb_per_s": statistics.median(wire_gb / r.fetch_s for r in rounds),
        "fetch_raw_gb_per_s": statistics.median(raw_gb / r.fetch_s for r in rounds),
        "fetch_to_client_alone": statistics.median(r.client_s / r.fetch_s for r in rounds),
        "engine_cpu_s_per_raw_gb": statistics.median(r.engine_cpu_s / raw_gb for r in rounds),
        "data_plane_cpu_s_per_raw_gb": statistics.median(r.data_plane_cpu_s / raw_gb for r in rounds),
        "store_cpu_s_per_raw_gb": statistics.median(r.store_cpu_s / raw_gb for r in rounds),
        "engine_share_of_cpu": statistics.median(shares),
        "engine_shares_of_cpu": shares,
    }


def _hashes(prefix: int, num_pages: int) -> list[bytes]:
    return [hashlib.sha256(f"{prefix} {page}".encode()).digest() for page in range(num_pages)]


def _store(plane: DataPlane, prefixes: Sequence[Sequence[bytes]], heads: HeadSlice) -> None:
    """Write K and V that vary slowly along the tokens, and wait until the store has them."""
    geometry = heads.geometry
    for prefix, hashes in enumerate(prefixes):
        generator = torch.Generator().manual_seed(prefix)
        shape = len(hashes) * geometry.page_size, LAYERS, HEADS, HEAD_DIM
        noise = [torch.randn(shape, generator=generator) for _ in TENSORS]
        values = [
            (x.cumsum(0) * 0.05 + x * 0.1).to(geometry.torch_dtype).view(len(hashes), -1, *shape[1:]) for x in noise
        ]
        by_tensor = dict(zip(TENSORS, values, strict=True))
        write_pages(plane, hashes, partial(_pages_of, by_tensor))


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


def _pages_of(values: Mapping[TensorName, torch.Tensor], tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
    return values[tensor][list(pages)]


def _find(plane: DataPlane, hashes: Sequence[bytes]) -> Found:
    return plane.look_up(Stage(0, b"".join(hashes), is_read_ahead=True)).result()


def _fetch(plane: DataPlane, prefixes: Sequence[Sequence[bytes]]) -> None:
    plane.flush()
    fetches, first = [], 0
    for hashes in prefixes:
        _find(plane, hashes)
        places = tuple(range(first, first + len(hashes)))
        over = plane.fetch(FetchPages(0, b"".join(hashes), places, time.monotonic() + _TIMEOUT_S)).over
        first += len(hashes)
        fetches.append((over, len(hashes)))
    for over, num_pages in fetches:
        if (got := over.result(_TIMEOUT_S).num_pages) < num_pages:
            raise SystemExit(f"only {got} of {num_pages} pages were fetched")


async def _read_alone(
    url: str,
    ca_file: Path | None,
    keys: StoreKeys,
    heads: HeadSlice,
    prefixes: Sequence[Sequence[bytes]],
    connections: int,
) -> tuple[float, int]:
    """Return the seconds that reading the same bytes takes, and the number of bytes."""
    tls = None if ca_file is None else TlsFiles(ca=str(ca_file))
    options = HttpOptions(timeout_s=_TIMEOUT_S, max_connections=connections, tls=tls)
    store = with_keys(open_remote(url, options=options), keys)
    quantiser = make_quantiser(QUANTISER)
    try:
        found = [await find_units(store, heads, hashes, quantiser, READ_SIZE) for hashes in prefixes]
        begin_s = time.perf_counter()
        size = await read_all(store, [unit for units in found for unit in units])
        return time.perf_counter() - begin_s, size
    finally:
        await store.close()


def _table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> Table:
    title = (
        f"{args.prefixes} prefixes of {args.tokens} tokens, {args.connections} connections, medians of {args.rounds}"
    )
    table = Table(title=title)
    for column in ("codec", "security"):
        table.add_column(column)
    for column in ("KV, GB", "wire, GB", "client alone", "fetch, wire", "fetch, KV", "engine", "data plane", "store"):
        table.add_column(column, justify="right")
    table.add_column("engine's share", justify="right")
    for row in rows:
        table.add_row(
            row["codec"],
            row["security"],
            *(f"{row[key]:.3f}" for key in ("raw_gb", "wire_gb")),
            *(f"{row[key]:.3f} GB/s" for key in ("client_alone_wire_gb_per_s", "fetch_wire_gb_per_s")),
            f"{row['fetch_raw_gb_per_s']:.3f} GB/s",
            *(f"{row[f'{who}_cpu_s_per_raw_gb']:.2f} s/GB" for who in ("engine", "data_plane", "store")),
            f"{row['engine_share_of_cpu']:.1%}",
        )
    return table


async def find_units(
    store: Store, heads: HeadSlice, page_hashes: Sequence[bytes], quantiser: Quantiser, size: ReadSize
) -> list[ReadUnit]:
    """Look pages up. Return the reads that fetch what is stored of them."""
    units: list[ReadUnit] = []
    for hit in (await store.lookup(heads.folder, page_hashes)).hits:
        reader = SegmentReader(open_manifest(decode_manifest(hit.manifest), store.keys), quantiser)
        units += [unit for span in range(reader.manifest.num_spans) for unit in read_units(reader, span, size)]
    return units


async def read_all(store: Store, units: Sequence[ReadUnit]) -> int:
    """Read all at once, as far as the client has connections. Return the number of bytes."""
    return sum(await asyncio.gather(*(_size(store, unit) for unit in units)))


async def _size(store: Store, unit: ReadUnit) -> int:
    size = 0
    for name, start, end in unit.reads:
        if not await store.read(name, start, [np.empty(end - start, dtype=np.uint8).data]):
            raise SystemExit(f"{name} is not in the store")
        size += end - start
    return size


if __name__ == "__main__":
    sys.exit(main())
