"""Measures a reader of a hostile store: by how much its memory grows, and for how long its event loop stands still.

    python -m benchmarks.hostile_store [--lookups N] [--at-once N] [--json FILE]

The store answers each lookup with other manifests, as many as an answer may hold, in one of three kinds: ``padding``,
of nearly 1 MiB, most of it in a field that readers ignore; ``variants``, of nearly 1 MiB, a page of 1,000 layers in 16
variants; ``small``, one a page, as small as they come. Store and reader have a process each, a fresh one for each kind.
Requests keep the pages that they found until the end. Memory is the largest resident set after a first small answer.
The loop's longest pause is that of a timer of 1 ms, so others that use the cores count.
"""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypedDict

import msgspec
import psutil  # type: ignore[import-untyped]
import torch
import xxhash
from aiohttp import web
from rich.console import Console

from benchmarks.heads import make_heads
from benchmarks.machine import machine
from benchmarks.processes import peak_rss_bytes
from benchmarks.report import make_parser, make_table, output_file, settings, whole_number, write_json
from harness.children import end_children_on_signals
from harness.small_segments import page_hashes
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.keys import HeadSlice, split_hashes
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.stores.base import SegmentHit
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.wire import MAX_LOOKUP_ANSWER_BYTES, Folders, LookupRequest, Route
from sgl_kvfetch.types import KVGeometry

KINDS = ("padding", "variants", "small")
_PAGES = 8192  # asked for in a lookup
_PADDING_BYTES = 990_000
_NUM_VARIANTS = 16
_LAYERS = {"padding": 1, "variants": 1000, "small": 1}
_TIMEOUT_S = 600.0
_MIB = 1 << 20


class Row(TypedDict):
    manifest_kib: float
    manifests_found: int
    grown_mib: float
    longest_pause_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.hostile_store", __doc__)
    parser.add_argument("--lookups", type=whole_number, default=48, help="how many")
    parser.add_argument("--at-once", type=whole_number, default=8, help="how many of them at a time")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    rows = {kind: _measure_beside(kind, args.lookups, args.at_once) for kind in KINDS}
    columns = ["manifests", "KiB", "found", "grown, MiB", "longest pause, ms"]
    cells = [[kind, *(f"{value:.1f}" for value in row.values())] for kind, row in rows.items()]
    Console().print(make_table("a reader of a hostile store", columns, cells))
    if args.json:
        write_json(args.json, {**settings(args), "rows": rows, "machine": machine()})
    return 0


def _measure_beside(kind: str, num_lookups: int, at_once: int) -> Row:
    """Start a store and a reader."""
    end_children_on_signals()
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    store = spawn.Process(target=_serve, args=(kind, theirs), daemon=True)
    store.start()
    try:
        port, size = ours.recv()
        with ProcessPoolExecutor(1, spawn) as readers:
            return readers.submit(_measure, kind, port, size, num_lookups, at_once).result()
    finally:
        store.terminate()
        store.join()


def _heads(kind: str) -> HeadSlice:
    geometry = KVGeometry(_LAYERS[kind], num_heads=1, k_head_dim=48, v_head_dim=48, page_size=1, dtype="bfloat16")
    return make_heads(geometry, make_quantiser("exact"))


def _serve(kind: str, to_reader: Connection) -> None:
    """Answer lookups, and send the port and the size of a manifest."""
    body = _body(kind)

    async def look_up(request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=LookupRequest)
        hits: list[SegmentHit] = []
        left = MAX_LOOKUP_ANSWER_BYTES - 16
        previous = None
        for page, own in enumerate(split_hashes(asked.page_hashes)):
            made = _sealed(body | {"first_page": page, "previous_hash": previous, "page_hashes": own})
            left -= len(made) + 16
            if left < 0:
                break
            hits.append(SegmentHit(made, 0, 1))
            previous = own
        return web.Response(body=msgspec.msgpack.encode(hits))

    async def folders(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(Folders([])))

    async def serve() -> None:
        app = web.Application(client_max_size=_MIB)
        app.add_routes([web.post(Route.LOOKUP, look_up), web.get(Route.FOLDERS + "/{digest}", folders)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        example = {"first_page": 0, "previous_hash": None, "page_hashes": bytes(32)}
        to_reader.send((runner.addresses[0][1], len(_sealed(body | example))))
        await asyncio.Event().wait()

    asyncio.run(serve())


def _body(kind: str) -> dict[str, Any]:
    """Return a manifest's fields, encoded, but for those that say where its page is."""
    spec = SegmentSpec(_heads(kind), make_quantiser("exact"), "zstd", "240p", 1)
    values = torch.zeros((1, _LAYERS[kind], 1, 48), dtype=torch.bfloat16)
    coded = encode_segment(spec, {"k": values, "v": values}, 0, None, page_hashes(1))
    body = msgspec.msgpack.decode(coded.manifest.encode()[12:-16])
    if kind == "padding":
        body["later"] = bytes(_PADDING_BYTES)
    if kind == "variants":
        body["variants"] *= _NUM_VARIANTS
    return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in body.items()}


def _sealed(body: dict[str, Any]) -> bytes:
    packed = msgspec.msgpack.encode(body)
    head = struct.pack("<4sHHI", b"KVFM", 2, 0, len(packed)) + packed
    return head + xxhash.xxh3_128_digest(head)


def _measure(kind: str, port: int, manifest_bytes: int, num_lookups: int, at_once: int) -> Row:
    """Look up pages, each time others. Runs in a process of its own."""
    pause_s = 0.0
    found: list[Sequence[PageSource]] = []
    faults: list[KVFetchError] = []

    async def watch() -> None:
        nonlocal pause_s
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.001)
            pause_s = max(pause_s, time.monotonic() - began_s - 0.001)

    async def measure() -> int:
        nonlocal pause_s
        store = HttpStore(f"http://127.0.0.1:{port}", options=HttpOptions(timeout_s=_TIMEOUT_S))
        finder = PageFinder(store, _heads(kind), make_quantiser("exact"), faults.append)
        await finder.find_pages(page_hashes(1), _TIMEOUT_S)
        asked = [page_hashes(_PAGES, str(number)) for number in range(num_lookups)]
        before = psutil.Process().memory_info().rss
        turns = asyncio.Semaphore(at_once)

        async def look_up(hashes: Sequence[bytes]) -> None:
            async with turns:
                found.append(await finder.find_pages(hashes, _TIMEOUT_S))

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        pause_s = 0.0
        await asyncio.gather(*map(look_up, asked))
        watching.cancel()
        await store.close()
        return int(before)

    gc.freeze()  # as the data plane does
    before = asyncio.run(measure())
    assert found[0], faults[:1]
    grown = peak_rss_bytes(os.getpid()) - before
    return Row(
        manifest_kib=manifest_bytes / 1024,
        manifests_found=sum(map(len, found)),
        grown_mib=grown / _MIB,
        longest_pause_ms=pause_s * 1e3,
    )


if __name__ == "__main__":
    sys.exit(main())
