"""Measures the memory that a fetch in device mode needs besides the slots that it fills.

Each point is a fetch of one prefix in a fresh process, with SGLang's own token-to-KV pool on the CPU, a store process
on a socket, and segments as a writer makes them. Resident memory is sampled every millisecond, starting right before
the fetch. By then, the pool's pages have been touched, and a fetch of one span has warmed up all code. ``peak`` is the
largest growth. ``compressed`` is the peak of the host buffer as the fetcher counts it, bounded by ``inflight_bytes``.
``decoded`` is the largest growth minus the buffer's bytes at the same time: integers, frames, values, and the memory of
the HTTP client. On a GPU, frames pass through the buffers of ``device_bytes``, which are made once; that figure is read
from the code, not measured. The prefix repeats one span, of values that drift along the tokens or, for klt, of random
coefficients. Only lengths matter here, not contents.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import hashlib
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
from typing import Any

import msgspec
import torch

from benchmarks.machine import machine, versions
from harness.store_process import StoreProcess
from sgl_kvfetch.config import parse_config
from sgl_kvfetch.container.segment import (
    CodedChunk,
    CodedSegment,
    SegmentSpec,
    encode_cells,
    encode_segment,
    make_variant,
)
from sgl_kvfetch.keys import HeadSlice, Namespace, buddy_split
from sgl_kvfetch.quant import Quantised, Quantiser, make_quantiser
from sgl_kvfetch.quant.klt import UNIT, ZERO, KltQuantiser
from sgl_kvfetch.quant.profile import load_profile
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, torch_dtype
from sgl_kvfetch.write.commit import commit_segment

GOAL_BYTES = 64 << 20  # bound on decoded data, for any length
PAGE_TOKENS = 64
SPAN_TOKENS = 1024
MAX_SEGMENT_TOKENS = 8192
SAMPLE_S = 0.001
_DEADLINE_S = 600.0
_ENVIRONMENT = {
    "KVFETCH_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    # Without limits, glibc keeps freed memory once larger blocks were freed, and it would still count as used.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "PYTHONWARNINGS": "ignore",
}


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
        assert self.quantiser in ("exact", "uint8")
        return make_quantiser(self.quantiser)

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
        """Return all heads of the model."""
        geometry = self.geometry(quantiser)
        namespace = Namespace(
            model=f"memory {self.codec}",
            model_dtype="dtype=auto",
            attention="mha",
            kv_dtype=geometry.dtype,
            page_size=geometry.page_size,
            num_layers=geometry.num_layers,
            first_layer=0,
            num_heads=geometry.num_heads,
            k_head_dim=geometry.k_head_dim,
            v_head_dim=geometry.v_head_dim,
            quantiser=quantiser.identity,
        )
        return HeadSlice(namespace, range(geometry.num_heads))


@dataclass(frozen=True)
class Point:
    """One fetch. Memory is relative to that before the fetch."""

    quantiser: str
    codec: str
    tokens: int
    raw_bytes: int  # size of the slots that it fills
    stored_bytes: int
    peak_bytes: int
    compressed_bytes: int
    decoded_bytes: int
    seconds: float
    samples: int


def page_hashes(num_pages: int) -> list[bytes]:
    return [hashlib.sha256(f"page {page}".encode()).digest() for page in range(num_pages)]


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
    span_pages = SPAN_TOKENS // PAGE_TOKENS
    hashes = page_hashes(num_tokens // PAGE_TOKENS)
    spec = SegmentSpec(setup.heads(quantiser), quantiser, setup.codec, "240p", span_pages)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        span = _encode_span(spec, hashes[:span_pages], threads)
    (variant,) = span.manifest.variants
    coded, start = [], 0
    for index, chunk in enumerate(variant.chunks):
        bitstream = span.data[start : start + chunk.size_bytes]
        coded.append(CodedChunk(chunk, bitstream, variant.frame_sum(index)))
        start += chunk.size_bytes
    segments = []
    for first, count in buddy_split(0, len(hashes), MAX_SEGMENT_TOKENS // PAGE_TOKENS):
        repeated, data = make_variant(coded * (count // span_pages), variant.layouts, setup.codec, "240p")
        manifest = spec.manifest(first, hashes[first - 1] if first else None, hashes[first : first + count])
        segments.append(CodedSegment(msgspec.structs.replace(manifest, variants=(repeated,)), data))
    return segments


def _encode_span(spec: SegmentSpec, hashes: Sequence[bytes], threads: ThreadPoolExecutor) -> CodedSegment:
    if not isinstance(spec.quantiser, KltQuantiser):
        return encode_segment(spec, drifting_values(spec.heads.geometry, SPAN_TOKENS), 0, None, hashes, threads)
    manifest = spec.manifest(0, None, hashes)
    counts = dict(zip(manifest.span_cells(0), manifest.coefficients, strict=True))
    return encode_cells(spec, manifest, lambda cell: random_coefficients(counts[cell], SPAN_TOKENS), threads)


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


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


class Sampler:
    """Samples the growth of resident memory, together with the bytes that wait compressed."""

    def __init__(self, compressed_bytes: Callable[[], int]) -> None:
        self._compressed_bytes = compressed_bytes
        self._base = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak = self.compressed = self.decoded = self.num_samples = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            held, compressed = resident_bytes() - self._base, self._compressed_bytes()
            self.peak = max(self.peak, held)
            self.compressed = max(self.compressed, compressed)
            self.decoded = max(self.decoded, held - compressed)
            self.num_samples += 1


async def measure(setup: Setup, num_tokens: int, extra: dict[str, Any]) -> Point:
    """Measure one fetch. The process must not have fetched anything before."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sgl_kvfetch.dataplane.client import open_client
    from sgl_kvfetch.fetch.plan import total_bytes
    from sgl_kvfetch.fetch.sink import GuardedSink
    from sgl_kvfetch.plugin.device.pages import DevicePages

    quantiser = setup.make_quantiser()
    geometry = setup.geometry(quantiser)
    pool = MHATokenToKVPool(
        num_tokens,
        PAGE_TOKENS,
        geometry.torch_dtype,
        geometry.num_heads,
        geometry.k_head_dim,
        geometry.num_layers,
        "cpu",
        False,
        v_head_dim=geometry.v_head_dim,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(1.0)  # touches every page of memory
    pages = DevicePages(pool, PAGE_TOKENS)
    config = parse_config(extra)
    hashes = page_hashes(num_tokens // PAGE_TOKENS)
    client = open_client(config, setup.heads(quantiser), quantiser)
    fetcher = client.fetcher
    try:
        sources = await client.finder.find(hashes, _DEADLINE_S)
        assert len(sources) == len(hashes), f"only {len(sources)} of {len(hashes)} pages are stored"
        warm = SPAN_TOKENS // PAGE_TOKENS
        await fetcher.fetch(sources[:warm], range(1, 1 + warm), GuardedSink(pages), _DEADLINE_S)
        give_back_memory()
        started_s = time.monotonic()
        with Sampler(lambda: fetcher._ahead_budget.used_bytes + fetcher._fetch_budget.used_bytes) as sampler:
            result = await fetcher.fetch(sources, range(1, 1 + len(hashes)), GuardedSink(pages), _DEADLINE_S)
        seconds = time.monotonic() - started_s
    finally:
        await client.close(_DEADLINE_S)
    assert result.num_pages == len(hashes), result
    return Point(
        setup.quantiser,
        setup.codec,
        num_tokens,
        num_tokens * geometry.token_bytes,
        total_bytes(sources),
        sampler.peak,
        sampler.compressed,
        sampler.decoded,
        seconds,
        sampler.num_samples,
    )


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


def report(points: Sequence[Point], extra: dict[str, Any]) -> dict[str, Any]:
    from sgl_kvfetch.plugin.device.cuda_pages import DEVICE_BYTES

    longest = max(point.tokens for point in points)
    return {
        "machine": machine(),
        "versions": versions(),
        "config": {key: value for key, value in extra.items() if key != "store"},
        "goal_bytes": GOAL_BYTES,
        "device_bytes": DEVICE_BYTES,
        "largest_decoded_bytes": max(point.decoded_bytes for point in points),
        "largest_decoded_bytes_of_longest": max(p.decoded_bytes for p in points if p.tokens == longest),
        "points": [asdict(point) for point in points],
    }


def table(points: Sequence[Point]) -> str:
    lines = ["quantiser codec   tokens  slots MB  stored MB |  peak MB  compressed  decoded |  fetch s"]
    for p in points:
        raw, stored, peak, compressed, decoded = (
            x / 1e6 for x in (p.raw_bytes, p.stored_bytes, p.peak_bytes, p.compressed_bytes, p.decoded_bytes)
        )
        lines.append(
            f"{p.quantiser:9} {p.codec:6} {p.tokens:7d} {raw:9.1f} {stored:10.1f} | {peak:8.1f} {compressed:11.1f} "
            f"{decoded:8.1f} | {p.seconds:8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--codec", nargs="+", default=["hevc", "zstd"])
    parser.add_argument("--quantiser", nargs="+", default=["exact", "uint8"], choices=["exact", "uint8"])
    parser.add_argument("--profile", help="a profile by kvfetch calibrate, to measure klt as well")
    parser.add_argument("--inflight-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="decoding threads")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.point is not None:
        task = json.loads(options.point)
        point = asyncio.run(measure(Setup(**task["setup"]), task["num_tokens"], task["extra"]))
        print(json.dumps(asdict(point)))
        return
    if unit := [n for n in options.tokens if n % SPAN_TOKENS]:
        parser.error(f"--tokens {unit}: expected multiples of {SPAN_TOKENS}")
    points = []
    quantisers = [*options.quantiser, *(["klt"] if options.profile else [])]
    for setup in [Setup(q, c, options.layers, options.profile) for q in quantisers for c in options.codec]:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(store_prefix(Path(directory), setup, max(options.tokens)))
            with StoreProcess(directory) as store:
                extra = {
                    "store": store.url,
                    "mode": "read_only",
                    "inflight_bytes": options.inflight_mib << 20,
                    "codec_threads": options.threads,
                    "fetch_timeout_s": _DEADLINE_S,
                }
                for num_tokens in options.tokens:
                    points.append(in_a_fresh_process(setup, num_tokens, extra))
                    print(table(points).splitlines()[-1] if len(points) > 1 else table(points), flush=True)
    content = report(points, extra)
    print(
        f"decoded data: {content['largest_decoded_bytes'] / 1e6:.1f} MB at most; goal {GOAL_BYTES / 1e6:.1f} MB. "
        f"Buffers on a GPU: {content['device_bytes'] / 1e6:.1f} MB, for all fetches together"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
