"""Runs a trace of requests through a real directory store that is too small, without and with dropping levels.

    python -m benchmarks.stores.levels TRACE [--requests 2000] [--parts 0.25,0.5,1] [--json OUT]

TRACE: Mooncake's format, a request a line; ``hash_ids`` are its blocks of 512 tokens. Each request looks up its blocks,
and writes those that the store lacks, one segment a block. The working set is all blocks of the requests that are run;
the store has room for ``--parts`` of it.

A segment's manifest and sizes are those of 512 real tokens in two levels, at a tenth of the size. "KL": the profile's
calibrated divergence of each served block, weighted by tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import xxhash
from rich.console import Console

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.windows import windows_of
from benchmarks.machine import machine, versions
from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.real_profile import PROMPTS_PART, real_profile
from benchmarks.report import make_parser, make_table, no_traceback, settings, whole_number, write_json
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.objects import Chunk
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.stores import Store

BLOCK_TOKENS = 512
_SHRINK = 10
_LOOKED_UP = 256  # blocks a lookup


class Request(msgspec.Struct):
    hash_ids: list[int]


@dataclass(frozen=True)
class Row:
    part: float  # of the working set for which there is room
    drop_levels: int
    asked_tokens: int
    served_tokens: int
    coarse_tokens: int  # of those served
    kl: float  # mean over those served
    num_evicted: int
    num_dropped: int


@dataclass(frozen=True)
class Block:
    """A stored block: its manifest but for its hash, and the contents of its data objects."""

    manifest: Manifest
    contents: tuple[bytes, ...]
    costs: tuple[float, float]  # KL by how many levels are dropped

    @property
    def size_bytes(self) -> int:
        return len(self.manifest.encode()) + sum(map(len, self.contents))

    def at(self, page: int, hashes: Sequence[bytes]) -> Block:
        """Return the block as a page of a prompt with these ``hashes``."""
        previous = hashes[page - 1] if page else None
        manifest = msgspec.structs.replace(
            self.manifest, first_page=page, previous_hash=previous, page_hashes=(hashes[page],)
        )
        return replace(self, manifest=manifest)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.stores.levels", __doc__)
    parser.add_argument("trace", type=Path, help="requests, one a line")
    parser.add_argument("--requests", type=whole_number, default=2000, help="lines that are used")
    parser.add_argument("--parts", default="0.25,0.5,1", help="capacities, in working sets")
    parser.add_argument("--model", help="a model's directory; else the real model")
    parser.add_argument("--profile", help="that model's profile by kvfetch calibrate")
    parser.add_argument("--folder", type=Path, help="where the stores are made; memory (/dev/shm) is fastest")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.profile):
        parser.error("--model and --profile need each other")
    with no_traceback():
        lines = args.trace.read_bytes().splitlines()[: args.requests]
        requests = [msgspec.json.decode(line, type=Request).hash_ids for line in lines]
        block = make_block(Path(args.model or real_model()), Path(args.profile or real_profile()))
        rows = list(_rows(requests, block, [float(part) for part in args.parts.split(",")], args.folder))
    columns = ("room", "levels dropped", "tokens asked", "served", "of these coarse", "KL", "evicted", "dropped")
    cells = [
        (
            f"{row.part:g}",
            str(row.drop_levels),
            f"{row.asked_tokens / 1e6:.2f} M",
            f"{row.served_tokens / row.asked_tokens:.1%}",
            f"{row.coarse_tokens / max(1, row.served_tokens):.1%}",
            f"{row.kl:.1e}",
            f"{row.num_evicted:,}",
            f"{row.num_dropped:,}",
        )
        for row in rows
    ]
    Console().print(make_table(f"{len(requests):,} requests of {args.trace.name}", columns, cells))
    if args.json:
        report = {"benchmark": "stores.levels", "config": settings(args), "machine": machine(), "versions": versions()}
        write_json(args.json, report | {"rows": [asdict(row) for row in rows]})
    return 0


def make_block(model_path: Path, profile_path: Path, shrink: int = _SHRINK) -> Block:
    """Return a block of real tokens, in two levels, of which only one byte of ``shrink`` is kept."""
    model, profile = KVModel(str(model_path)), load_profile(profile_path)
    klt = KltQuantiser(profile)
    (ids,) = windows_of(model, [prose()], PROMPTS_PART, 1, BLOCK_TOKENS)
    k, v = (x.bfloat16() for x in model.kv(ids))
    namespace = Namespace(
        model="m", model_dtype="bfloat16", attention="mha", kv_dtype="bfloat16", page_size=BLOCK_TOKENS,
        num_layers=k.shape[1], first_layer=0, num_heads=k.shape[2], k_head_dim=k.shape[3], v_head_dim=v.shape[3],
        quantiser=klt.identity,
    )  # fmt: skip
    spec = SegmentSpec(HeadSlice(namespace, range(k.shape[2])), klt, "ans", FLAT, span_pages=1, num_levels=2)
    coded = encode_segment(spec, {"k": k, "v": v}, 0, None, [bytes(32)])
    (variant,), (level,) = coded.manifest.variants, coded.manifest.levels
    chunks, data = _shrunk(variant.chunks, coded.data, shrink)
    level_chunks, level_data = _shrunk(level.chunks, coded.level_data[0], shrink)
    level = msgspec.structs.replace(level, data_digest=xxhash.xxh3_128_hexdigest(level_data), chunks=level_chunks)
    variant = msgspec.structs.replace(
        variant, data_digest=xxhash.xxh3_128_hexdigest(data), chunks=chunks, levels=(level,)
    )
    manifest = msgspec.structs.replace(coded.manifest, variants=(variant,))
    return Block(manifest, (data, level_data), (profile.kl_of(klt.step), profile.kl_of(3 * klt.step)))


def _shrunk(rows: Sequence[Chunk], data: bytes, shrink: int) -> tuple[tuple[Chunk, ...], bytes]:
    sizes = [max(1, row.size_bytes // shrink) for row in rows]
    shrunk = tuple(msgspec.structs.replace(row, size_bytes=size) for row, size in zip(rows, sizes, strict=True))
    return shrunk, data[: sum(sizes)]


def _rows(
    requests: Sequence[Sequence[int]], block: Block, parts: Sequence[float], folder: Path | None
) -> Iterator[Row]:
    working_set = len({each for blocks in requests for each in blocks}) * block.size_bytes
    for part in parts:
        for drop_levels in (0, 1):
            with tempfile.TemporaryDirectory(prefix="kvfetch-levels-", dir=folder) as root:
                yield asyncio.run(_run(Path(root), requests, block, part, int(part * working_set), drop_levels))


async def _run(
    root: Path, requests: Sequence[Sequence[int]], block: Block, part: float, capacity: int, drop_levels: int
) -> Row:
    store = LocalStore(root, capacity_bytes=capacity, drop_levels=drop_levels)
    served = [0, 0]  # blocks, by levels dropped
    try:
        for blocks in requests:
            hashes = [hashlib.sha256(str(number).encode()).digest() for number in blocks]
            found = await _find(store, block, hashes)
            for dropped in found:
                served[dropped] += 1
            for page in range(len(found), len(hashes)):
                await put_block(store, block.at(page, hashes))
        usage = await store.usage()
    finally:
        await store.close()
    num_served = sum(served)
    kl = sum(count * cost for count, cost in zip(served, block.costs, strict=True)) / max(1, num_served)
    asked_tokens = BLOCK_TOKENS * sum(map(len, requests))
    tokens = num_served * BLOCK_TOKENS, served[1] * BLOCK_TOKENS
    return Row(part, drop_levels, asked_tokens, *tokens, kl, usage.num_evicted, usage.num_dropped_levels)


async def _find(store: LocalStore, block: Block, hashes: Sequence[bytes]) -> list[int]:
    """Return the levels that each found block has lost."""
    found: list[int] = []
    for first in range(0, len(hashes), _LOOKED_UP):
        hits = (await store.lookup(block.manifest.heads.folder, hashes[first : first + _LOOKED_UP])).hits
        found += [decode_manifest(hit.manifest).variants[0].num_dropped for hit in hits]
        if len(found) < first + _LOOKED_UP:
            break
    return found


async def put_block(store: Store, block: Block) -> None:
    manifest = block.manifest
    for rows, content in zip(manifest.data, block.contents, strict=True):
        await store.put(manifest.data_name(rows), content)
    await store.put(manifest.key.manifest_name, manifest.encode())


if __name__ == "__main__":
    sys.exit(main())
