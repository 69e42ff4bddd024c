"""Open the stores that a config names, build the client that reads and writes them, and count what happens there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CodedSegment, Decoders, EncodedSegment, Quantiser, SegmentSpec
from sgl_kvfetch.codec.bitstream.registry import writers_resolution
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.metrics import count_miss
from sgl_kvfetch.plane.access import CONNECT_S, fresh_keys, s3_options, store_token, tls_files
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.offers import Chooser, Tolerance
from sgl_kvfetch.plane.fetch.plan import ReadSize
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.fetch.reads import UnitReader
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plane.write.writer import Writer
from sgl_kvfetch.protocol import KVFetchConfig
from sgl_kvfetch.protocol.quantiser import cell_heads, power_of_two_pages, span_pages
from sgl_kvfetch.stores import HttpOptions, Store, open_remote, with_keys

if TYPE_CHECKING:
    from sgl_kvfetch.codec.bitstream.nvdec import Nvdec

logger = logging.getLogger(__name__)


_INFLIGHT_BYTES = 256 << 20  # compressed bytes that may wait to be decoded
SILENCE_S = 0.3  # how long nothing of a lookup or a read may come before it is asked for again


def open_configured_store(config: KVFetchConfig, on_received: Callable[[int], None] = lambda num_bytes: None) -> Store:
    """Open the store that the config names, and count its retries and the index's failures. Raises ConfigError.
    ``on_received``: as in `HttpOptions`."""
    store = open_remote(
        config.store,
        token=store_token(config),
        options=HttpOptions(
            timeout_s=config.fetch_timeout_s,
            connect_timeout_s=min(CONNECT_S, config.lookup_timeout_s),
            max_connections=config.max_connections,
            silence_s=SILENCE_S,
            on_retry=lambda error: metrics.RETRIES.inc(),
            on_received=on_received,
            tls=replace(tls_files(config), on_ends=metrics.record_certificates),
        ),
        s3=replace(
            s3_options(config),
            on_index_failure=lambda error: metrics.INDEX_FAILURES.labels(error.reason).inc(),
        ),
    )
    return with_keys(store, fresh_keys(config))


RESOLUTION = "240p"  # the smallest files, and no slower to decode than larger pictures
MAX_SEGMENT_TOKENS = 8192  # limit for a segment, the unit of lookup and commit
_QUEUED_SEGMENTS = 4  # so many segments fit into the write queue at least, unless one has a single span
_LINGER_S = 0.05  # how long pages wait for the next ones before a segment is cut
_RETIRE_S = 60.0  # minimum time to keep segments that were written again, for readers that found them
READ_SIZE = ReadSize(4 << 20)
# What an engine's GPU decodes is only verified here: no piece of a span is of use before the others, and fewer requests
# take less.
WHOLE_SPANS = ReadSize(16 << 20, 1)
_DECODE_BYTES = 64 << 20  # frames and values on their way to pages


@dataclass(frozen=True, slots=True)
class StoreClient:
    """The parts that read and write the store. All of them belong to one event loop."""

    store: Store
    finder: PageFinder
    reads: UnitReader
    fetcher: Fetcher
    writer: Writer
    encode_pool: Executor

    async def clear(self, heads: HeadSlice) -> None:
        """Delete all segments with a rank's heads from the store, also those of other TP sizes. Raises KVFetchError."""
        self.finder.forget_pages()
        self.reads.memory.drop()
        await self.store.delete_prefix(heads.folder + "/")  # first, as listing may fail
        for each in heads.siblings(await self.store.folders(heads.namespace.digest())):
            await self.store.delete_prefix(each.folder + "/")

    async def close(self, step_s: float) -> None:
        """Write what is queued, and release sockets and threads: each step within ``step_s``."""
        for step in (self.writer.drain, self.writer.close, self.store.close):
            try:
                async with asyncio.timeout(step_s):
                    await step()
            except TimeoutError:
                logger.warning("kvfetch: %s did not finish within %g s; closing anyway", step.__qualname__, step_s)
        self.fetcher.pool.close(wait=False)
        self.encode_pool.shutdown(wait=False, cancel_futures=True)
        for queue in ("read", "write"):
            metrics.QUEUED_BYTES.labels(queue).set(0)


def open_client(
    config: KVFetchConfig,
    heads: HeadSlice,
    quantiser: Quantiser,
    *,
    nvdec: Nvdec | None = None,
    max_span_pages: int | None = None,
    engine_codecs: Collection[str] = (),
    memory: MemoryCache | None = None,
) -> StoreClient:
    """Open the store; call this on the event loop. ``nvdec`` decodes what it can, the CPU the rest.
    ``max_span_pages``: upper limit for the pages of a span. ``engine_codecs``: those that the engine decodes.
    ``memory`` keeps what is read and written. Raises ConfigError."""
    tolerance, memory = Tolerance(config.coarseness(quantiser)), memory or MemoryCache()
    encode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-encode")
    link = Link()
    store = open_configured_store(config, link.received)
    spec = SegmentSpec(
        heads,
        quantiser,
        config.codec,
        writers_resolution(config.codec, RESOLUTION),
        span_pages(heads, max_span_pages),
        cell_heads(heads, config.max_tp_size),
        encrypts=config.key_file is not None,
        num_levels=config.num_levels,
    )
    try:
        spec.require_readable()
    except FormatError as e:
        raise ConfigError(str(e)) from e
    read_size = WHOLE_SPANS if engine_codecs else READ_SIZE
    pool = _open_pool(config, nvdec)
    reads = UnitReader(
        store,
        Chooser(tolerance, pool, link),
        read_size=read_size,
        inflight_bytes=_INFLIGHT_BYTES,
        may_delete=config.writes,
        memory=memory,
    )
    fetcher = Fetcher(reads, pool, decode_bytes=_DECODE_BYTES)
    finder = PageFinder(
        store,
        heads,
        quantiser,
        partial(count_miss, "lookup"),
        link.answered,
        engine_codecs=(*engine_codecs, *(() if nvdec is None else nvdec.codecs)),
        tolerance=tolerance,
        memory=memory,
    )
    writer = Writer(
        store,
        spec,
        encode_pool,
        max_segment_pages=spec.longest_segment(_longest_segment(spec, config.write_queue_bytes)),
        queue_bytes=config.write_queue_bytes,
        linger_s=_LINGER_S,
        retire_s=max(_RETIRE_S, 2 * config.fetch_timeout_s),
        ttl_s=config.ttl_s,
        refines=config.quantiser_name == "klt" and tolerance.coarseness == 0,
    )
    if config.memory_cache:
        writer.on_committed = partial(_keep_written, memory, finder, read_size)
    return StoreClient(store, finder, reads, fetcher, writer, encode_pool)


def _keep_written(
    memory: MemoryCache, finder: PageFinder, size: ReadSize, segment: CodedSegment | EncodedSegment
) -> None:
    with contextlib.suppress(KVFetchError):  # a segment that this server cannot read itself
        memory.put_segment(finder.own_reader(segment.manifest), segment, size)


def _longest_segment(spec: SegmentSpec, queue_bytes: int) -> int:
    """Return how many pages a segment may have. Those of lossless values are as large as their pages: several must fit
    into the queue, so that some are sent while others are encoded."""
    most = power_of_two_pages(MAX_SEGMENT_TOKENS, spec.heads.namespace.page_size)
    if spec.quantiser.is_lossless:
        fitting = max(1, queue_bytes // _QUEUED_SEGMENTS // spec.heads.geometry.page_bytes)
        most = min(most, max(spec.span_pages, 1 << (fitting.bit_length() - 1)))
    return most


def _open_pool(config: KVFetchConfig, nvdec: Nvdec | None) -> DecodePool[Decoders]:
    """Open ``codec_threads`` decode sessions, and with NVDEC at least one per video engine. If only the CPU decodes, as
    many again follow at low priority, which take what comes while all before them are busy."""
    if nvdec is not None:
        num_sessions = max(config.codec_threads, nvdec.num_engines)
        return DecodePool([nvdec.open_session() for _ in range(num_sessions)])
    sessions: list[Decoders] = [{} for _ in range(2 * config.codec_threads)]
    return DecodePool(sessions, num_yielding=config.codec_threads)
