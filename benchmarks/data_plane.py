"""Measures how fast pages come through the data plane, and how much CPU time that takes in the engine's process.

    python -m benchmarks.data_plane --json out.json

Prefixes are stored with one codec. Then a data plane in its own process fetches them together, over loopback, from a
store in another process. This process represents the engine: it copies values from shared memory into a pool. Each
round also reads the same bytes in this process with only the store's client, which shows the limit of store, sockets
and client on this machine. With `raw` nothing has to be decoded, so the two can be compared. CPU seconds are per GB of
K and V, for the engine's process and for the data plane's, without the store's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.report import write_json
from harness.memory_pool import MemoryPool
from harness.store_process import StoreProcess
from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.dataplane.launch import DataPlaneProcess, Line
from sgl_kvfetch.dataplane.messages import Start
from sgl_kvfetch.dataplane.plane import DataPlane, Find
from sgl_kvfetch.fetch.plan import ReadUnit, read_units
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions
from sgl_kvfetch.stores.open import open_replicas
from sgl_kvfetch.stores.replicas import ReplicaOptions
from sgl_kvfetch.types import TENSORS

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 6, 8, 128
QUANTISER: Final = "uint8"
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Round:
    client_s: float
    fetch_s: float
    engine_cpu_s: float
    data_plane_cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    rows = []
    for codec in args.codecs.split(","):
        with console.status(codec), tempfile.TemporaryDirectory(prefix="kvfetch-data-plane-") as folder:
            rows.append(_measure(codec, Path(folder), args))
    console.print(_table(rows, args))
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        write_json(args.json, {**settings, "codecs": rows, "machine": machine(), "versions": versions()})
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--codecs", default="raw,zstd,hevc", help="(default: %(default)s)")
    parser.add_argument("--prefixes", type=int, default=4, help="fetched together (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="per prefix, a power of two (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="to the store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    return parser.parse_args(argv)


def _measure(codec: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
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

    with StoreProcess(folder) as store:
        config = {
            "store": store.url,
            "quantiser": QUANTISER,
            "codec": codec,
            "max_connections": args.connections,
            "fetch_timeout_s": _TIMEOUT_S,
        }
        plane = DataPlane(Start(config, namespace, 0, HEADS, 0, None), heads.geometry, launch)
        try:
            _store(plane, prefixes, heads)
            pool = MemoryPool(heads.geometry, num_pages * args.prefixes, 0.0)
            rounds, sizes = [], set()
            for _ in range(args.rounds):
                client_s, wire_bytes = asyncio.run(_read_alone(store.url, heads, prefixes, args.connections))
                sizes.add(wire_bytes)
                begin_s, engine_s = time.perf_counter(), time.process_time()
                data_plane_s = _cpu_s(started[0])
                _fetch(plane, prefixes, pool)
                rounds.append(
                    Round(
                        client_s,
                        time.perf_counter() - begin_s,
                        time.process_time() - engine_s,
                        _cpu_s(started[0]) - data_plane_s,
                    )
                )
        finally:
            plane.close()
    (wire_bytes,) = sizes
    raw_gb = args.prefixes * num_pages * heads.geometry.page_bytes / 1e9
    return _row(codec, rounds, raw_gb, wire_bytes / 1e9)


def _row(codec: str, rounds: Sequence[Round], raw_gb: float, wire_gb: float) -> dict[str, Any]:
    shares = [r.engine_cpu_s / (r.engine_cpu_s + r.data_plane_cpu_s) for r in rounds]
    return {
        "codec": codec,
        "raw_gb": raw_gb,
        "wire_gb": wire_gb,
        "client_alone_wire_gb_per_s": statistics.median(wire_gb / r.client_s for r in rounds),
        "fetch_wire_gb_per_s": statistics.median(wire_gb / r.fetch_s for r in rounds),
        "fetch_raw_gb_per_s": statistics.median(raw_gb / r.fetch_s for r in rounds),
        "fetch_to_client_alone": statistics.median(r.client_s / r.fetch_s for r in rounds),
        "engine_cpu_s_per_raw_gb": statistics.median(r.engine_cpu_s / raw_gb for r in rounds),
        "data_plane_cpu_s_per_raw_gb": statistics.median(r.data_plane_cpu_s / raw_gb for r in rounds),
        "engine_share_of_cpu": statistics.median(shares),
        "engine_shares_of_cpu": shares,
    }


def _cpu_s(data_plane: DataPlaneProcess) -> float:
    times = psutil.Process(data_plane.process.pid).cpu_times()
    return float(times.user + times.system)


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
        step = plane.most_pages()
        for first in range(0, len(hashes), step):
            pages = slice(first, first + step)

            def read(k: torch.Tensor, v: torch.Tensor, pages: slice = pages, values: Any = values) -> bool:
                k.copy_(values[0][pages])
                v.copy_(values[1][pages])
                return True

            if not plane.write(first, hashes[first - 1] if first else None, hashes[pages], read, _TIMEOUT_S):
                raise SystemExit("the data plane does not accept pages")
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (found := _find(plane, hashes).num_pages) < len(hashes):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"only {found} of {len(hashes)} pages were stored within {_TIMEOUT_S:g} s")
            time.sleep(0.05)


def _find(plane: DataPlane, hashes: Sequence[bytes]) -> Find:
    found: list[Find] = []
    plane.look_up(hashes, found.append)
    while not found:
        time.sleep(1e-4)
    return found[0]


def _fetch(plane: DataPlane, prefixes: Sequence[Sequence[bytes]], pool: MemoryPool) -> None:
    plane.flush()
    calls, first = [], 0
    for hashes in prefixes:
        call = plane.fetch(
            hashes, [len(hashes)], time.monotonic() + _TIMEOUT_S, found=_find(plane, hashes).work, first_page=0
        )
        plane.give(call, 0, Destination(range(first, first + len(hashes)), GuardedSink(pool)))
        first += len(hashes)
        calls.append((call, len(hashes)))
    for call, num_pages in calls:
        if (got := call.over[0].result(_TIMEOUT_S)) < num_pages:
            raise SystemExit(f"only {got} of {num_pages} pages were fetched")


async def _read_alone(
    url: str, heads: HeadSlice, prefixes: Sequence[Sequence[bytes]], connections: int
) -> tuple[float, int]:
    """Return the seconds that reading the same bytes takes, and the number of bytes."""
    options = HttpOptions(timeout_s=_TIMEOUT_S, max_connections=connections)
    store = open_replicas([url], options=options, replicas=ReplicaOptions())
    quantiser, units = make_quantiser(QUANTISER), []
    try:
        for hashes in prefixes:
            for hit in (await store.lookup(heads.folder, hashes)).hits:
                reader = SegmentReader(decode_manifest(hit.manifest), quantiser)
                units += [u for span in range(reader.manifest.num_spans) for u in read_units(reader, span, 4 << 20)]
        begin_s = time.perf_counter()
        sizes = await asyncio.gather(*(_size(store, u) for u in units))
        return time.perf_counter() - begin_s, sum(sizes)
    finally:
        await store.close()


async def _size(store: Store, unit: ReadUnit) -> int:
    data = await store.get(unit.reader.data_name, unit.start, unit.size_bytes)
    if data is None:
        raise SystemExit(f"{unit.reader.data_name} is not in the store")
    return len(data)


def _table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> Table:
    title = (
        f"{args.prefixes} prefixes of {args.tokens} tokens, {args.connections} connections, medians of {args.rounds}"
    )
    table = Table(title=title)
    for column in ("codec", "KV, GB", "wire, GB", "client alone", "fetch, wire", "fetch, KV", "engine", "data plane"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    table.add_column("engine's share", justify="right")
    for row in rows:
        table.add_row(
            row["codec"],
            *(f"{row[key]:.3f}" for key in ("raw_gb", "wire_gb")),
            *(f"{row[key]:.3f} GB/s" for key in ("client_alone_wire_gb_per_s", "fetch_wire_gb_per_s")),
            f"{row['fetch_raw_gb_per_s']:.3f} GB/s",
            *(f"{row[key]:.2f} s/GB" for key in ("engine_cpu_s_per_raw_gb", "data_plane_cpu_s_per_raw_gb")),
            f"{row['engine_share_of_cpu']:.1%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
