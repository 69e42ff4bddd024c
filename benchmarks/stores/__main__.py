"""Measures a hit on each kind of store: its requests and round trips, its time, and what the requests would cost.

python -m benchmarks.stores --json stores.json
AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python -m benchmarks.stores --s3-endpoint http://HOST:PORT --bucket NAME

A prefix is looked up, together with a question that is not stored, and its bytes are read with the client that SGLang's
servers use, from real servers over real sockets. It has the geometry of Llama-3.1-8B, and is an eighth of the raw KV's
size. Bytes are neither decoded nor restored; the disk tier verifies those that it reads.

Relays in front of the servers count requests, and delay them by the round trip time. Round trips are the longest chain
of requests each of which came after the one before was answered. They are counted at 20 ms, and the hit with the fewest
counts: a machine that stands still for a moment may add some. With a round trip time of 0, times are taken without
relays. Relays limit no bandwidth, but take CPU time, so MB/s are comparable at 0 only. S3 is moto unless an endpoint is
given. moto says nothing of S3's speed, and has a connection for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contention import CpuUse, other_cores
from benchmarks.machine import machine, versions
from benchmarks.reads import find_units, read_all
from benchmarks.report import write_json
from benchmarks.stats import distribution
from benchmarks.stores.relay import Exchange, Relay, round_trips
from benchmarks.stores.servers import KINDS, Servers, relayed, running_servers
from harness.metrics import own_metric
from harness.small_segments import page_hashes
from harness.waiting import until
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane.client import READ_SIZE, SPAN_TOKENS
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.processes import run_and_end
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.tools.estimate import GET_PRICE, PRICES_AS_OF, PUT_PRICE
from sgl_kvfetch.types import TENSORS

PAGE_SIZE, HEADS, HEAD_DIM = 64, 8, 128
QUANTISER = make_quantiser("uint8")
PARTS = ("lookup", "fetch")
_READ_BYTES_METRIC = "sgl_kvfetch_local_cache_read_bytes_total"
_COUNT_RTT_S = 0.02
_COUNTED_HITS = 5
_WARM_UP_HITS = 3


@dataclass(frozen=True)
class Prefix:
    heads: HeadSlice
    page_hashes: Sequence[bytes]  # the question's included
    segments: Sequence[CodedSegment]

    @property
    def num_bytes(self) -> int:
        return sum(len(segment.data) for segment in self.segments)


@dataclass(frozen=True)
class Hit:
    lookup_s: float
    fetch_s: float
    cpu_s: float  # of this process, in the fetch
    lookup: Mapping[str, list[Exchange]] = field(default_factory=dict)  # by server
    fetch: Mapping[str, list[Exchange]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False, width=130)
    before = CpuUse.now()
    with tempfile.TemporaryDirectory(prefix="kvfetch-stores-") as folder, console.status("coding") as status:
        prefix = make_prefix(args.segments, args.question_tokens, args.layers)
        with running_servers(Path(folder), args.s3_endpoint, args.bucket) as servers:
            rows = []
            try:
                asyncio.run(_fill(servers, prefix))
                for kind in args.kinds:
                    status.update(kind)
                    rows.append(_measure(servers, kind, prefix, args))
            finally:
                asyncio.run(_empty(servers, prefix))
            others = other_cores(before, CpuUse.now())
    _print(console, rows, args, prefix)
    if args.json:
        settings = {**vars(args), "json": str(args.json), "wire_bytes": prefix.num_bytes, "prices_as_of": PRICES_AS_OF}
        about = {"other_cores": others, "machine": machine(), "versions": versions()}
        write_json(args.json, {**settings, "stores": rows, **about})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stores", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[4096], help="tokens of each, powers of two (default: 4096)"
    )
    parser.add_argument("--question-tokens", type=int, default=512, help="behind the prefix (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument(
        "--rtt-ms", type=float, nargs="+", default=[0.0, 1.0, 10.0], help="to every server (default: 0 1 10)"
    )
    parser.add_argument("--hits", type=int, default=30, help="timed (default: %(default)s)")
    parser.add_argument("--s3-endpoint", metavar="http://HOST:PORT", help="(default: moto is started)")
    parser.add_argument("--bucket", default="kv-cache", help="at that endpoint; it exists (default: %(default)s)")
    parser.add_argument("--get-usd", type=float, default=GET_PRICE * 1e6, help="a million (default: %(default)s)")
    parser.add_argument("--put-usd", type=float, default=PUT_PRICE * 1e6, help="a million (default: %(default)s)")
    args = parser.parse_args(argv)
    starts = [end - tokens for end, tokens in zip(accumulate(args.segments), args.segments, strict=True)]
    for start, tokens in zip(starts, args.segments, strict=True):
        if tokens < PAGE_SIZE or tokens.bit_count() != 1 or start % tokens:
            parser.error(f"--segments: {tokens} tokens cannot be a segment at token {start}")
    return args


def make_prefix(segments: Sequence[int], question_tokens: int, layers: int) -> Prefix:
    """Make K and V that coding with uint8 and zstd reduces to an eighth: each value is one of three, at random."""
    namespace = Namespace(
        "benchmark", "dtype=auto", "mha", "bfloat16", PAGE_SIZE, layers, 0, HEADS, HEAD_DIM, HEAD_DIM,
        QUANTISER.identity,
    )  # fmt: skip
    heads = HeadSlice(namespace, range(HEADS))
    spec = SegmentSpec(heads, QUANTISER, "zstd", "240p", SPAN_TOKENS // PAGE_SIZE)
    hashes = page_hashes((sum(segments) + question_tokens) // PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    coded, first = [], 0
    with ThreadPoolExecutor() as pool:
        for tokens in segments:
            shape = (tokens, layers, HEADS, HEAD_DIM)
            values = {
                tensor: torch.randint(-1, 2, shape, dtype=torch.int8, generator=generator).to(torch.bfloat16)
                for tensor in TENSORS
            }
            end = first + tokens // PAGE_SIZE
            previous = hashes[first - 1] if first else None
            coded.append(encode_segment(spec, values, first, previous, hashes[first:end], pool))
            first = end
    return Prefix(heads, hashes, coded)


async def _fill(servers: Servers, prefix: Prefix) -> None:
    for kind in ("kvfetch serve", "S3 with index"):
        store = servers.open(kind)
        for segment in prefix.segments:
            await commit_segment(store, segment)
        await store.close()


async def _empty(servers: Servers, prefix: Prefix) -> None:
    store = servers.open("S3")
    await store.delete_prefix(prefix.heads.folder + "/")
    await store.close()


@contextmanager
def _behind(servers: Servers, rtt_s: float) -> Iterator[Servers]:
    """Yield the same servers behind relays, or as they are if the round trip time is 0."""
    if not rtt_s:
        yield servers
        return
    with relayed(servers, rtt_s) as (behind, _):
        yield behind


def _measure(servers: Servers, kind: str, prefix: Prefix, args: argparse.Namespace) -> dict[str, Any]:
    with relayed(servers, _COUNT_RTT_S) as (behind, relays):
        counted = asyncio.run(_hits(behind, kind, prefix, _COUNTED_HITS, relays))
    times = {}
    for rtt_ms in args.rtt_ms:
        with _behind(servers, rtt_ms / 1e3) as behind:
            times[f"{rtt_ms:g}"] = _times(asyncio.run(_hits(behind, kind, prefix, args.hits, {})), prefix.num_bytes)
    lookup, fetch = (min((_requests(getattr(hit, part)) for hit in counted), key=Counter.total) for part in PARTS)
    both = lookup + fetch
    gets = both["s3 GET"] + both["s3 HEAD"]
    puts = sum(n for name, n in both.items() if name.startswith("s3 ")) - gets
    return {
        "store": kind,
        "lookup_round_trips": min(_chain(hit.lookup) for hit in counted),
        "fetch_round_trips": min(_chain(hit.fetch) for hit in counted),
        "lookup_requests": lookup,
        "fetch_requests": fetch,
        "connections_opened": min(map(_connections, counted)),
        "usd_a_million_hits": gets * args.get_usd + puts * args.put_usd,
        "by_rtt_ms": times,
        "counted": [{part: _requests(getattr(hit, part)) for part in PARTS} for hit in counted],
    }


async def _hits(servers: Servers, kind: str, prefix: Prefix, num_hits: int, relays: Mapping[str, Relay]) -> list[Hit]:
    """Return the hits that follow the warm-up: connections are open by then, and the disk has the prefix."""
    store = servers.open(kind)

    async def is_warm() -> bool:
        before = own_metric(_READ_BYTES_METRIC, tier="disk")
        await _hit(store, prefix, {})
        return not kind.startswith("disk") or own_metric(_READ_BYTES_METRIC, tier="disk") == before + prefix.num_bytes

    try:
        for _ in range(_WARM_UP_HITS):
            await until(is_warm)
        _take(relays)
        return [await _hit(store, prefix, relays) for _ in range(num_hits)]
    finally:
        await store.close()


async def _hit(store: Store, prefix: Prefix, relays: Mapping[str, Relay]) -> Hit:
    begin_s = time.perf_counter()
    units = await find_units(store, prefix.heads, prefix.page_hashes, QUANTISER, READ_SIZE)
    lookup_s = time.perf_counter() - begin_s
    lookup = _take(relays)
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    size = await read_all(store, units)
    fetch_s = time.perf_counter() - begin_s
    if size != prefix.num_bytes:
        raise SystemExit(f"{size} of {prefix.num_bytes} bytes were found")
    return Hit(lookup_s, fetch_s, time.process_time() - cpu_s, lookup, _take(relays))


def _take(relays: Mapping[str, Relay]) -> dict[str, list[Exchange]]:
    return {name: relay.take() for name, relay in relays.items()}


def _chain(exchanges: Mapping[str, Sequence[Exchange]]) -> int:
    return round_trips([exchange for of_server in exchanges.values() for exchange in of_server])


def _connections(hit: Hit) -> int:
    """Return how many connections a hit opened. Each took a round trip more, which is in the times."""
    exchanges = [*hit.lookup.values(), *hit.fetch.values()]
    return sum(each.is_first for of_server in exchanges for each in of_server)


def _requests(exchanges: Mapping[str, Sequence[Exchange]]) -> Counter[str]:
    """Count requests by server and method, such as "s3 GET"."""
    return Counter(f"{server} {each.method}" for server, of_server in exchanges.items() for each in of_server)


def _times(hits: Sequence[Hit], num_bytes: int) -> dict[str, Any]:
    fetch_s = distribution([hit.fetch_s for hit in hits])
    return {
        "lookup_s": asdict(distribution([hit.lookup_s for hit in hits])),
        "fetch_s": asdict(fetch_s),
        "hit_s": asdict(distribution([hit.lookup_s + hit.fetch_s for hit in hits])),
        "mb_per_s": num_bytes / 1e6 / (fetch_s.p50 or 1),
        "cpu_s_per_gb": statistics.median(hit.cpu_s for hit in hits) / (num_bytes / 1e9),
    }


def _print(console: Console, rows: Sequence[dict[str, Any]], args: argparse.Namespace, prefix: Prefix) -> None:
    segments = ", ".join(map(str, args.segments))
    title = f"one hit of {prefix.num_bytes / 1e6:.1f} MB in segments of {segments} tokens"
    requests = Table(title=title, caption=f"prices as of {PRICES_AS_OF}")
    for column in ("store", "lookup, trips", "fetch, trips", "lookup", "fetch", "connects", "USD for a million hits"):
        requests.add_column(column)
    times = Table(title=f"ms, {args.hits} hits each; CPU time is the client's in the fetch")
    for column in ("store", "RTT", "lookup p50", "p95", "hit p50", "p95", "MB/s", "CPU s/GB"):
        times.add_column(column, justify="left" if column == "store" else "right")
    for row in rows:
        texts = [", ".join(f"{n} {name}" for name, n in row[f"{part}_requests"].items()) for part in PARTS]
        trips = [str(row[f"{part}_round_trips"]) for part in PARTS]
        requests.add_row(
            row["store"], *trips, *texts, str(row["connections_opened"]), f"{row['usd_a_million_hits']:.2f}"
        )
        for rtt_ms, at in row["by_rtt_ms"].items():
            cells = [f"{at[part][p] * 1e3:.1f}" for part in ("lookup_s", "hit_s") for p in ("p50", "p95")]
            times.add_row(row["store"], rtt_ms, *cells, f"{at['mb_per_s']:.0f}", f"{at['cpu_s_per_gb']:.2f}")
    console.print(requests, times)


if __name__ == "__main__":
    run_and_end(lambda: sys.exit(main()))
