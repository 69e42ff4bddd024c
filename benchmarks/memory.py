"""Measures the memory that a fetch in device mode needs besides the values that it restores.

Each point is a fetch of one prefix in a fresh process: it is staged in shared memory, as the data plane does it, and
loaded into SGLang's own token-to-KV pool on the CPU. A store process on a socket serves it, of segments as a writer
makes them. Resident memory is sampled every millisecond, starting right before the fetch. By then, pool and shared
memory have been touched, and a fetch of one span has warmed up all code. ``peak`` is the largest growth. ``compressed``
is the peak of the host buffer as the fetcher counts it, at most half of what may wait to be decoded. ``decoded`` is the
largest growth minus the buffer's bytes at the same time: integers, frames, values on their way to shared memory, and
the memory of the HTTP client. On a GPU, loads pass through the buffers of ``device_bytes``, which are made once; that
figure is read from the code, not measured. The prefix repeats one span, of values that drift along the tokens or, for
klt, of random coefficients. Only lengths matter here, not contents.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from rich.console import Console

from benchmarks.heads import make_heads
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, write_json
from harness.small_segments import page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.reader import CodedChunk
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_cells, encode_segment, make_variant
from sgl_kvfetch.codec.quant.base import Quantised, Quantiser
from sgl_kvfetch.codec.quant.klt import UNIT, ZERO, KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import HeadSlice, buddy_split
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, torch_dtype

if TYPE_CHECKING:
    from sgl_kvfetch.plane.store import StoreClient

_SAMPLE_S = 0.001
GOAL_BYTES = 64 << 20  # bound on decoded data, for any length
PAGE_TOKENS = 64
SPAN_TOKENS = 1024
MAX_SEGMENT_TOKENS = 8192
_DEADLINE_S = 600.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Without limits, glibc keeps freed memory once larger blocks were freed, and it would still count as used.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "PYTHONWARNINGS": "ignore",
}


class Sampler:
    """Reads several numbers of bytes every millisecond. ``peaks`` holds each one's largest growth since the start."""

    def __init__(self, read: Callable[[], Sequence[int]]) -> None:
        self._read = read
        self._base = read()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peaks = [0] * len(self._base)
        self.num_samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            grown = (now - base for now, base in zip(self._read(), self._base, strict=True))
            self.peaks = list(map(max, self.peaks, grown))
            self.num_samples += 1


@dataclass(frozen=True)
class Setup:
    """The settings that all points of a quantiser and codec share."""

    quantiser: str
    codec: str
    layers: int
    profile: str | None = None

    def make_quantiser(self) -> Quantiser:
        if self.quantiser == "klt":
            assert self.profile is not None
            return KltQuantiser(load_profile(Path(self.profile)))
        return make_quantiser("exact" if self.quantiser == "exact" else "uint8")

    def geometry(self, quantiser: Quantiser) -> KVGeometry:
        """Return eight heads of 128; with a profile its heads, and its first layers, rounded up to whole cells."""
        num_layers, num_heads, k_dim, v_dim = self.layers, 8, 128, 128
        if isinstance(quantiser, KltQuantiser):
            profile = quantiser.profile
            whole = -(-num_layers // profile.grid.cell_layers) * profile.grid.cell_layers
            num_layers, num_heads = min(whole, profile.grid.num_layers), profile.grid.num_heads
            k_dim, v_dim = profile.k_head_dim, profile.v_head_dim
        return KVGeometry(num_layers, num_heads, k_dim, v_dim, PAGE_TOKENS, "bfloat16")

    def heads(self, quantiser: Quantiser) -> HeadSlice:
        return make_heads(self.geometry(quantiser), quantiser)


@dataclass(frozen=True)
class Point:
    """One fetch. Memory is relative to that before the fetch."""

    quantiser: str
    codec: str
    tokens: int
    raw_bytes: int  # size of the slots that it fills, and of what is staged
    stored_bytes: int
    peak_bytes: int
    compressed_bytes: int
    decoded_bytes: int
    seconds: float
    samples: int


def drifting_values(geometry: KVGeometry, num_tokens: int) -> dict[TensorName, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values: dict[TensorName, torch.Tensor] = {}
    for tensor in TENSORS:
        shape = (num_tokens, geometry.num_layers, geometry.num_heads, geometry.head_dim(tensor))
        drift = torch.randn(shape, generator=generator).cumsum(0) * 0.1
        values[tensor] = drift.to(torch_dtype(geometry.dtype))
    return values


def repeated_segments(setup: Setup, num_tokens: int) -> list[CodedSegment]:
    """Return a prefix of equal spans. Only one span is encoded."""
    quantiser = setup.make_quantiser()
    span_pages, resolution = SPAN_TOKENS // PAGE_TOKENS, resolution_for(setup.codec, "240p")
    hashes = page_hashes(num_tokens // PAGE_TOKENS)
    spec = SegmentSpec(setup.heads(quantiser), quantiser, setup.codec, resolution, span_pages)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        span = _encode_span(spec, hashes[:span_pages], threads)
    (variant,) = span.manifest.variants
    coded, start = [], 0
    for chunk in variant.chunks:
        bitstream = span.data[start : start + chunk.size_bytes]
        coded.append(CodedChunk(chunk, bitstream))
        start += chunk.size_bytes
    segments = []
    for first, count in buddy_split(0, len(hashes), MAX_SEGMENT_TOKENS // PAGE_TOKENS):
        repeated, data = make_variant(coded * (count // span_pages), variant.layouts, setup.codec, resolution)
        manifest = spec.manifest(first, hashes[first - 1] if first else None, hashes[first : first + count])
        segments.append(CodedSegment(msgspec.structs.replace(manifest, variants=(repeated,)), data))
    return segments


def _encode_span(spec: SegmentSpec, hashes: Sequence[bytes], threads: ThreadPoolExecutor) -> CodedSegment:
    if not isinstance(spec.quantiser, KltQuantiser):
        return encode_segment(spec, drifting_values(spec.heads.geometry, SPAN_TOKENS), 0, None, hashes, threads)
    manifest = spec.manifest(0, None, hashes)
    counts = dict(zip(manifest.span_cells(0), manifest.coefficients, strict=True))
    return encode_cells(spec, manifest, lambda cell: random_coefficients(counts[cell], SPAN_TOKENS), threads).joined()


def random_coefficients(count: int, num_tokens: int) -> Quantised:
    """Return the parts of a ``klt`` cell without exact tokens, with about three bits per coefficient."""
    steps = 2 * torch.randn((count, num_tokens), generator=torch.Generator().manual_seed(count))
    integers = (ZERO + steps.round()).to(torch.uint8)
    exponents = torch.full((num_tokens,), UNIT, dtype=torch.uint8)
    return exponents, torch.empty(0, dtype=torch.uint8), integers


async def store_prefix(directory: Path, setup: Setup, num_tokens: int) -> None:
    store = LocalStore(directory)
    try:
        for segment in repeated_segments(setup, num_tokens):
            await commit_segment(store, segment)
    finally:
        await store.close()


def held_bytes(fetcher: Fetcher) -> tuple[int, int, int]:
    """Return the process's resident memory, the bytes that wait compressed, and the difference."""
    with open("/proc/self/statm", "rb") as statm:
        resident = int(statm.read().split()[1]) * mmap.PAGESIZE
    compressed = fetcher._ahead_budget.used_bytes + fetcher._fetch_budget.used_bytes
    return resident, compressed, resident - compressed


def make_pool(setup: Setup, num_tokens: int, device: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    geometry = setup.geometry(setup.make_quantiser())
    return MHATokenToKVPool(
        num_tokens,
        PAGE_TOKENS,
        geometry.torch_dtype,
        geometry.num_heads,
        geometry.k_head_dim,
        geometry.num_layers,
        device,
        False,
        v_head_dim=geometry.v_head_dim,
    )


async def measure(setup: Setup, num_tokens: int, extra: dict[str, Any]) -> Point:
    """Measure one fetch. The process must not have fetched anything before."""
    from sgl_kvfetch.plane.fetch.plan import span_parts
    from sgl_kvfetch.plane.store import open_client

    quantiser = setup.make_quantiser()
    geometry = setup.geometry(quantiser)
    hashes = page_hashes(num_tokens // PAGE_TOKENS)
    client = open_client(parse_config(extra), setup.heads(quantiser), quantiser)
    fetcher = client.fetcher
    try:
        sources = await client.finder.find_pages(hashes, _DEADLINE_S)
        assert len(sources) == len(hashes), f"only {len(sources)} of {len(hashes)} pages are stored"
        engine = _Engine(setup, parse_config(extra), client, num_tokens)
        await engine.fetch(hashes[: SPAN_TOKENS // PAGE_TOKENS])
        give_back_memory()
        started_s = time.monotonic()
        with Sampler(lambda: held_bytes(fetcher)) as sampler:
            await engine.fetch(hashes)
        seconds = time.monotonic() - started_s
        await engine.close()
    finally:
        await client.close(_DEADLINE_S)
    peak_bytes, compressed_bytes, decoded_bytes = sampler.peaks
    return Point(
        setup.quantiser,
        setup.codec,
        num_tokens,
        num_tokens * geometry.token_bytes,
        sum(part.size_bytes for part in span_parts(sources)),
        peak_bytes,
        compressed_bytes,
        decoded_bytes,
        seconds,
        sampler.num_samples,
    )


class _Engine:
    """Stages prompts, and loads them into a pool. All memory of the pool, and of what is staged, has been touched."""

    def __init__(self, setup: Setup, config: KVFetchConfig, client: StoreClient, num_tokens: int) -> None:
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

        from sgl_kvfetch.plane.fetch.finder import StoredPrompts
        from sgl_kvfetch.plane.staging import Stager
        from sgl_kvfetch.plugin.device.pages import DevicePages, EnginePools, ValueLoader
        from sgl_kvfetch.protocol.arena import Arena, Room

        heads = setup.heads(setup.make_quantiser())
        pool = make_pool(setup, num_tokens, "cpu")
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(1.0)
        num_bytes = num_tokens * heads.geometry.token_bytes
        self._geometry, self._arena = heads.geometry, Arena.create(num_bytes)
        self._arena.whole.fill_(1)
        self._staged: asyncio.Queue[Any] = asyncio.Queue()
        what = config, heads, client, self._arena, Room(num_bytes)
        self._prompts = StoredPrompts(*what, side_bytes={}, num_served=lambda hashes, sources: len(sources))
        self._stager = Stager(self._prompts, self._staged.put_nowait, takes_code=False)
        layers = range(heads.geometry.num_layers)
        counter = LayerWiseLoadCounter(len(layers))
        self._loader = ValueLoader(DevicePages(pool, PAGE_TOKENS), counter, EnginePools(pool, layers))

    async def fetch(self, hashes: Sequence[bytes]) -> None:
        from sgl_kvfetch.plugin.device.pages import Load
        from sgl_kvfetch.protocol.arena import StagedValues
        from sgl_kvfetch.protocol.messages import Stage, Unstage

        self._stager.begin(Stage(1, b"".join(hashes)))
        answer = await self._staged.get()
        assert answer.num_pages == len(hashes), answer
        staged = StagedValues.of(answer, self._arena, self._geometry)
        slots = torch.arange(PAGE_TOKENS, (1 + len(hashes)) * PAGE_TOKENS)
        assert self._loader.finish(self._loader.begin([Load(staged, slots, lambda is_sound: None)]))
        self._stager.release(Unstage(1))

    async def close(self) -> None:
        self._loader.close()
        await self._prompts.tasks.cancel()
        self._arena.close()


def give_back_memory() -> None:
    """Return freed memory to the system, so that it counts as growth if the fetch uses it again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def in_a_fresh_process(setup: Setup, num_tokens: int, extra: dict[str, Any]) -> Point:
    task = json.dumps({"setup": asdict(setup), "num_tokens": num_tokens, "extra": extra})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--point", task],
        stdout=subprocess.PIPE,
        env=os.environ | _ENVIRONMENT,
        check=True,
    )
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def report(points: Sequence[Point], config: dict[str, Any]) -> dict[str, Any]:
    from sgl_kvfetch.plugin.device.gpu_loads import MOST_SCRATCH_BYTES
    from sgl_kvfetch.plugin.device.gpu_pages import READ_BUFFER_BYTES

    longest = max(point.tokens for point in points)
    return {
        "machine": machine(),
        "versions": versions(),
        "config": config,
        "goal_bytes": GOAL_BYTES,
        "device_bytes": READ_BUFFER_BYTES + MOST_SCRATCH_BYTES,
        "largest_decoded_bytes": max(point.decoded_bytes for point in points),
        "largest_decoded_bytes_of_longest": max(p.decoded_bytes for p in points if p.tokens == longest),
        "points": [asdict(point) for point in points],
    }


_COLUMNS = ("quantiser, codec", "tokens", "slots MB", "stored MB", "peak MB", "compressed", "decoded", "fetch s")


def cells(point: Point) -> list[str]:
    sizes = (point.raw_bytes, point.stored_bytes, point.peak_bytes, point.compressed_bytes, point.decoded_bytes)
    megabytes = (f"{size / 1e6:.1f}" for size in sizes)
    return [f"{point.quantiser}, {point.codec}", str(point.tokens), *megabytes, f"{point.seconds:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.memory", __doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="of the prefixes")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--codec", nargs="+", default=["hevc", "zstd"], help="of the prefixes")
    parser.add_argument("--quantiser", nargs="+", default=["exact", "uint8"], choices=["exact", "uint8"])
    parser.add_argument("--profile", help="a profile by kvfetch calibrate, to measure klt as well")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="decoding threads")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.point is not None:
        task = json.loads(args.point)
        point = asyncio.run(measure(Setup(**task["setup"]), task["num_tokens"], task["extra"]))
        print(json.dumps(asdict(point)))
        return
    if unit := [n for n in args.tokens if n % SPAN_TOKENS]:
        parser.error(f"--tokens {unit}: expected multiples of {SPAN_TOKENS}")
    console = Console(width=120)
    config = {
        "mode": "read_only",
        "codec_threads": args.threads,
        "fetch_timeout_s": _DEADLINE_S,
    }
    points = []
    quantisers = [*args.quantiser, *(["klt"] if args.profile else [])]
    for setup in [Setup(q, c, args.layers, args.profile) for q in quantisers for c in args.codec]:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(store_prefix(Path(directory), setup, max(args.tokens)))
            with StoreProcess(directory) as store:
                for num_tokens in args.tokens:
                    points.append(in_a_fresh_process(setup, num_tokens, {"store": store.url} | config))
                    console.print(*cells(points[-1]))
    content = report(points, config)
    console.print(make_table("Memory that a fetch needs", _COLUMNS, map(cells, points)))
    console.print(
        f"decoded data: {content['largest_decoded_bytes'] / 1e6:.1f} MB at most; goal {GOAL_BYTES / 1e6:.1f} MB. "
        f"Buffers on a GPU: {content['device_bytes'] / 1e6:.1f} MB, for all fetches together"
    )
    if args.json:
        write_json(args.json, content)


if __name__ == "__main__":
    main()
