"""Measures how fast pages of exact values are written, and what CPU time that takes in each process.

    python -m benchmarks.writing --codec ans raw --tokens 8192

Pages of a model of Llama-3.1-8B's shape go through a data plane in its own process to a store in another one, over
loopback, all in memory. This process represents the engine: it reads pages from a pool into shared memory. The clock
runs until the store finds all pages, for a client of its own: a data plane that looks pages up reads them ahead.
CPU seconds are given a GB of raw values.

The first round is that of a new process, whose memory is fresh; the kernel clears each page of it. In the others, it is
used again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.processes import usage
from benchmarks.report import write_json
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, Peer, Setup
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.protocol.arena import Line
from sgl_kvfetch.protocol.messages import Start
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.types import TENSORS, TensorName

_PAGE_SIZE, _LAYERS, _HEADS, _DIM = 64, 32, 8, 128
_OWN_PAGES = 16  # that the pool has: pages are copies of them
_TIMEOUT_S, _POLL_S = 300.0, 0.02
KINDS = ("random", "smooth")


@dataclass(frozen=True)
class Round:
    seconds: float
    raw_gb: float
    engine_cpu_s: float
    data_plane_cpu_s: float
    store_cpu_s: float

    @property
    def raw_mb_per_s(self) -> float:
        return 1e3 * self.raw_gb / self.seconds


def measure(kind: str, codec: str, num_tokens: int, num_rounds: int, layers: int = _LAYERS) -> list[Round]:
    """Write ``num_tokens`` of new pages in each round."""
    dims, quantiser = (_HEADS, _DIM, _DIM), make_quantiser("exact").identity
    namespace = Namespace("m", "dtype=bfloat16", "mha", "bfloat16", _PAGE_SIZE, layers, 0, *dims, quantiser)
    heads = HeadSlice(namespace, range(_HEADS))
    values, started = _values(kind, layers), list[DataPlaneProcess]()

    def launch(line: Line) -> DataPlaneProcess:
        started.append(DataPlaneProcess(line))
        return started[-1]

    def read(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        return values[tensor][[page % _OWN_PAGES for page in pages]]

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        StoreProcess(Path(folder) / "store") as store,
        asyncio.Runner() as runner,
    ):
        settings = {"store": store.url, "codec": codec, "fetch_timeout_s": _TIMEOUT_S}
        plane = DataPlane(Start(settings, namespace, 0, _HEADS, 0, None), Peer(Setup(launch, heads.geometry)))
        raw_gb = num_tokens // _PAGE_SIZE * heads.geometry.page_bytes / 1e9
        rounds = []
        try:
            for number in range(num_rounds):
                hashes = [hashlib.sha256(f"{number} {n}".encode()).digest() for n in range(num_tokens // _PAGE_SIZE)]
                before, begin_s = _cpu_s(started[0], store), time.perf_counter()
                first = 0
                while first < len(hashes):  # it takes as many as there is room for
                    before_first, rest = hashes[first - 1] if first else None, range(first, len(hashes))
                    first += plane.write(first, before_first, hashes[first:], rest, read)
                    if time.perf_counter() > begin_s + _TIMEOUT_S:
                        raise SystemExit("the data plane does not accept pages")
                runner.run(_until_stored(store.url, heads, hashes))
                seconds = time.perf_counter() - begin_s
                used_s = (y - x for x, y in zip(before, _cpu_s(started[0], store), strict=True))
                rounds.append(Round(seconds, raw_gb, *used_s))
        finally:
            plane.close()
    return rounds


async def _until_stored(url: str, heads: HeadSlice, hashes: Sequence[bytes]) -> None:
    store, deadline_s = open_remote(url, options=HttpOptions(timeout_s=_TIMEOUT_S)), time.monotonic() + _TIMEOUT_S
    try:
        while (found := (await store.lookup(heads.folder, hashes)).num_pages) < len(hashes):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"only {found} of {len(hashes)} pages were stored within {_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)
    finally:
        await store.close()


def _cpu_s(data_plane: DataPlaneProcess, store: StoreProcess) -> tuple[float, float, float]:
    return time.process_time(), usage(data_plane.process.pid).cpu_s, usage(store.pid).cpu_s


def _values(kind: str, layers: int) -> dict[TensorName, torch.Tensor]:
    """Return the values of `_OWN_PAGES` pages: noise, or random walks along the tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = _OWN_PAGES * _PAGE_SIZE, layers, _HEADS, _DIM
    found: dict[TensorName, torch.Tensor] = {}
    for tensor in TENSORS:
        x = torch.randn(shape, generator=generator)
        x = x if kind == "random" else 0.05 * x.cumsum(0)
        found[tensor] = x.to(torch.bfloat16).view(_OWN_PAGES, _PAGE_SIZE, layers, _HEADS, _DIM)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", nargs="+", default=["ans", "raw"], help="codecs of the config")
    parser.add_argument("--values", nargs="+", default=["random"], choices=KINDS)
    parser.add_argument("--tokens", type=int, default=8192, help="of each round")
    parser.add_argument("--layers", type=int, default=_LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table(title=f"{args.tokens} tokens a round; CPU seconds a GB of raw values")
    for column in ("codec", "values", "round", "MB/s", "engine", "data plane", "store"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for codec in args.codec:
        for kind in args.values:
            for number, each in enumerate(measure(kind, codec, args.tokens, args.rounds, args.layers), 1):
                cpu_s = [x / each.raw_gb for x in (each.engine_cpu_s, each.data_plane_cpu_s, each.store_cpu_s)]
                names = ("engine_cpu_s_per_gb", "data_plane_cpu_s_per_gb", "store_cpu_s_per_gb")
                row = {"codec": codec, "values": kind, "round": number, "raw_mb_per_s": each.raw_mb_per_s}
                rows.append(row | dict(zip(names, cpu_s, strict=True)))
                table.add_row(codec, kind, str(number), f"{each.raw_mb_per_s:.0f}", *(f"{x:.2f}" for x in cpu_s))
    Console().print(table)
    if args.json:
        write_json(args.json, {"writes": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
