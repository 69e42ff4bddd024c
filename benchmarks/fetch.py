"""Measures how close a fetch comes to the time of its longest stage.

    python -m benchmarks.fetch --json out.json

A prefix is stored as video and fetched with the client that both modes of SGLang use. The store is real and runs in
another process, sockets and decoding are real, and values are restored into a pool's pages. The link's speed is
limited, so that transmitting takes three times as long as decoding and restoring (`link`), or a third of it (`decode`).
With several codecs, the fetch chooses among the prefix's variants.

Each round times every stage alone, then the fetch. ``ideal_s`` is the longest stage's time, and ``efficiency`` is
``ideal_s / actual_s``. Decoding and restoring count as one stage, because the same threads do both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.heads import make_heads
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, settings, whole_number, write_json
from harness.memory_pool import MemoryPool
from harness.small_segments import page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import Cell
from sgl_kvfetch.codec.container.reader import CellChunks, SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, PoolPages, restore_cells
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadSize, ReadUnit, read_units, span_parts
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.open import open_remote
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.tools.encoder import make_targets, transcode
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 6, 8, 128
SPAN_TOKENS = 256
READ_SIZE = ReadSize(256 << 10)
CONNECTIONS = 16
SETTINGS = {"link": 3.0, "decode": 1 / 3}  # transmit time divided by decode and restore time
_TIMEOUT_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="kvfetch-fetch-") as folder, ThreadPoolExecutor(args.threads) as threads:
        with console.status("coding a prefix"):
            segment = _make_segment(args)
            asyncio.run(_put(segment, Path(folder)))
        bench = Bench(segment, Path(folder), threads, args)
        rows = []
        for name in args.settings:
            with console.status(f"{name}-bound"):
                rows.append(bench.run(name, SETTINGS[name]))
    console.print(_table(rows, args))
    if args.json:
        write_json(args.json, {**settings(args), "settings": rows, "machine": machine(), "versions": versions()})
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.fetch", __doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--tokens", type=whole_number, default=4096, help="a power of two")
    parser.add_argument("--codecs", default="hevc", help="the prefix's variants, such as hevc,zstd")
    parser.add_argument("--quantiser", default="uint8", choices=["uint8", "exact"], help="of the prefix")
    parser.add_argument("--threads", type=whole_number, default=1, help="for decoding and restoring")
    parser.add_argument("--rounds", type=whole_number, default=5, help="how many")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which to measure")
    args = parser.parse_args(argv)
    args.settings = args.settings.split(",")
    if unknown := set(args.settings) - set(SETTINGS):
        parser.error(f"--settings: unknown are {', '.join(sorted(unknown))}; known are {', '.join(SETTINGS)}")
    return args


def _make_segment(args: argparse.Namespace) -> CodedSegment:
    """Return a segment with K and V that vary slowly along the tokens."""
    quantiser = make_quantiser(args.quantiser)
    geometry = KVGeometry(LAYERS, HEADS, HEAD_DIM, HEAD_DIM, PAGE_SIZE, "bfloat16")
    generator = torch.Generator().manual_seed(0)
    values: dict[TensorName, torch.Tensor] = {}
    for tensor in TENSORS:
        noise = torch.randn((args.tokens, LAYERS, HEADS, HEAD_DIM), generator=generator)
        values[tensor] = (noise.cumsum(0) * 0.05 + noise * 0.1).to(torch.bfloat16)
    hashes = page_hashes(args.tokens // PAGE_SIZE)
    codecs = args.codecs.split(",")
    spec = SegmentSpec(make_heads(geometry, quantiser), quantiser, codecs[0], "240p", SPAN_TOKENS // PAGE_SIZE)
    with ThreadPoolExecutor() as pool:
        coded = encode_segment(spec, values, 0, None, hashes, pool)
    return coded if len(codecs) == 1 else transcode(coded.manifest, coded.data, make_targets(codecs, ["240p"]))


async def _put(segment: CodedSegment, folder: Path) -> None:
    store = LocalStore(folder)
    await commit_segment(store, segment)
    await store.close()


class Bench:
    """Fetches one prefix over links of several speeds."""

    def __init__(
        self, segment: CodedSegment, folder: Path, threads: ThreadPoolExecutor, args: argparse.Namespace
    ) -> None:
        self._folder, self._threads, self._args = folder, threads, args
        self._segment = segment
        self._reader = SegmentReader(segment.manifest, make_quantiser(args.quantiser))
        self._sources = [PageSource(self._reader, page) for page in range(segment.manifest.num_pages)]
        manifest = segment.manifest
        self._units = [unit for span in range(manifest.num_spans) for unit in read_units(self._reader, span, READ_SIZE)]
        self._pool = MemoryPool(manifest.geometry, manifest.num_pages, 1.0)  # filled, so that no round has page faults

    def run(self, name: str, transmit_share: float) -> dict[str, Any]:
        self._decode_restore_s()  # warm up
        gbps = len(self._segment.data) * 8 / (transmit_share * self._decode_restore_s()) / 1e9
        rounds = [self._round(gbps) for _ in range(self._args.rounds)]
        medians = {stage: statistics.median(each[stage] for each in rounds) for stage in rounds[0]}
        efficiencies = [ideal_s(each) / each["actual"] for each in rounds]
        return {
            "name": name,
            "link_gbps": gbps,
            "wire_bytes": len(self._segment.data),
            "ideal_s": statistics.median(map(ideal_s, rounds)),
            "actual_s": medians.pop("actual"),
            "efficiency": statistics.median(efficiencies),
            "stages_s": medians,
            "efficiencies": efficiencies,
        }

    def _round(self, gbps: float) -> dict[str, float]:
        """Return the seconds of each stage alone, with as many threads as the fetch has, and of the whole fetch."""
        return {
            "transmit": self._over_link(gbps, self._transmit),
            "decode": self._decode_s(),
            "restore": self._restore_s(),
            "decode_restore": self._decode_restore_s(),
            "actual": self._over_link(gbps, self._fetch),
        }

    def _over_link(self, gbps: float, work: Callable[[Store], Any]) -> float:
        """Return the seconds of ``work``. Each call starts a fresh store."""
        with StoreProcess(self._folder, link_gbps=[gbps]) as store:
            return asyncio.run(self._timed(store.url, work))

    async def _timed(self, url: str, work: Callable[[Store], Any]) -> float:
        options = HttpOptions(timeout_s=_TIMEOUT_S, max_connections=CONNECTIONS)
        store = open_remote(url, options=options)
        try:
            begin_s = time.perf_counter()
            await work(store)
            return time.perf_counter() - begin_s
        finally:
            await store.close()

    async def _transmit(self, store: Store) -> None:
        await asyncio.gather(
            *(store.get(name, start, end - start) for u in self._units for name, start, end in u.reads)
        )

    async def _fetch(self, store: Store) -> None:
        fetcher = Fetcher(
            store,
            DecodePool([{}] * self._args.threads),
            read_size=READ_SIZE,
            inflight_bytes=256 << 20,
            may_delete=False,
        )
        num_pages = self._segment.manifest.num_pages
        result = await fetcher.fetch(self._sources, PoolPages(self._pool, range(num_pages)), _TIMEOUT_S)
        await asyncio.to_thread(fetcher.close)
        if result.num_pages != num_pages:
            raise SystemExit(f"only {result.num_pages} of {num_pages} pages were fetched: {result.failures}")

    def _decode_s(self) -> float:
        return self._on_threads(lambda unit, cell: self._reader.decode_cell(cell, self._chunks(unit, cell)))

    def _restore_s(self) -> float:
        quantised = {
            cell: self._reader.decode_cell(cell, self._chunks(unit, cell))
            for unit in self._units
            for cell in unit.cells
        }

        def restore(_: ReadUnit, cell: Any) -> None:
            values = self._reader.dequantise_cell(cell, quantised[cell])
            first, end = self._segment.manifest.span_range(cell.span)
            grid = self._segment.manifest.grid
            self._pool.write(grid.layers(cell.layer_group), grid.heads(cell.head_block), range(first, end), values)

        return self._on_threads(restore)

    def _decode_restore_s(self) -> float:
        pages = PoolPages(self._pool, range(self._segment.manifest.num_pages))
        parts = {part.span: part for part in span_parts(self._sources)}

        def restore(unit: ReadUnit, cell: Any) -> None:
            one = ReadUnit(self._reader, (cell,))
            restore_cells(pages, parts[cell.span], one, [self._chunks(unit, cell)], {})

        return self._on_threads(restore)

    def _chunks(self, unit: ReadUnit, cell: Cell) -> CellChunks:
        return unit.split(self._data(unit))[unit.cells.index(cell)]

    def _data(self, unit: ReadUnit) -> bytes:
        ((_, start, end),) = unit.reads
        return self._segment.data[start:end]

    def _on_threads(self, work: Callable[[ReadUnit, Any], Any]) -> float:
        """Return the seconds of ``work`` on all cells."""
        cells = [(unit, cell) for unit in self._units for cell in unit.cells]
        begin_s = time.perf_counter()
        list(self._threads.map(lambda each: work(*each), cells))
        return time.perf_counter() - begin_s


def ideal_s(stages_s: dict[str, float]) -> float:
    return max(stages_s["transmit"], stages_s["decode_restore"])


def _table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> Table:
    return make_table(
        f"fetches of {args.tokens} tokens, {args.codecs}, medians of {args.rounds}",
        ("bound by", "link", "transmit", "decode", "restore", "both", "ideal", "actual", "efficiency"),
        [
            (
                row["name"],
                f"{row['link_gbps']:.3f} Gbps",
                *(f"{row['stages_s'][key]:.2f} s" for key in ("transmit", "decode", "restore", "decode_restore")),
                f"{row['ideal_s']:.2f} s",
                f"{row['actual_s']:.2f} s",
                f"{row['efficiency']:.3f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
