"""The data plane's client of the store, built from the config."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sgl_kvfetch import metrics
from sgl_kvfetch.adapt.decode_profile import load_decode_profile
from sgl_kvfetch.adapt.policy import LookAhead
from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.codecs import nvenc
from sgl_kvfetch.codecs.base import Decoders, FrameEncoder
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.codecs.surfaces import MAX_SURFACE_BYTES
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.container.segment import SegmentSpec
from sgl_kvfetch.errors import KVFetchError, StoreError
from sgl_kvfetch.fetch.fetcher import Fetcher, FetchResult, failure_reason
from sgl_kvfetch.fetch.finder import PageFinder
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions
from sgl_kvfetch.stores.open import open_replicas
from sgl_kvfetch.stores.replicas import ReplicaOptions
from sgl_kvfetch.write.writer import Writer

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

RESOLUTION = "240p"  # the smallest files, and no slower to decode than larger pictures
MAX_SEGMENT_TOKENS = 8192  # limit for a segment, the unit of lookup and commit
_LINGER_S = 0.25  # how long pages wait for the next ones before a segment is cut
_RETIRE_S = 60.0  # minimum time to keep merged halves, for readers that do not know of the merge
_HORIZON = 8  # cells to look ahead; a choice takes the event loop a few milliseconds
_CONNECT_S = 5.0  # limit for one attempt to connect to the store
_DECODE_BYTES = 64 << 20  # frames and values on their way to pages


@dataclass(frozen=True, slots=True)
class StoreClient:
    """The parts that read and write the store. All of them belong to one event loop."""

    store: Store
    finder: PageFinder
    fetcher: Fetcher
    writer: Writer
    encode_pool: Executor

    async def clear(self, heads: HeadSlice) -> None:
        """Delete a rank's segments from the store. Raises KVFetchError."""
        self.finder.forget()
        await self.store.delete_prefix(heads.folder + "/")

    async def close(self, step_s: float) -> None:
        """Write what is queued, and release sockets and threads: each step within ``step_s``."""
        for step in (self.writer.drain, self.writer.close, self.store.close):
            try:
                async with asyncio.timeout(step_s):
                    await step()
            except TimeoutError:
                logger.warning("kvfetch: %s did not finish within %g s; closing anyway", step.__qualname__, step_s)
        self.fetcher.close(wait=False)
        self.encode_pool.shutdown(wait=False, cancel_futures=True)
        for queue in ("read", "write"):
            metrics.QUEUED_BYTES.labels(queue).set(0)


def open_client(
    config: KVFetchConfig,
    heads: HeadSlice,
    quantiser: Quantiser,
    *,
    nvdec: Nvdec | None = None,
    encoders: Mapping[str, FrameEncoder] | None = None,
    max_span_pages: int | None = None,
) -> StoreClient:
    """Open the store; call this on the event loop. ``nvdec`` decodes what it can; without it, the CPU decodes.
    ``encoders``: from `open_encoders`. ``max_span_pages``: upper limit for ``span_tokens``. Raises ConfigError."""
    encode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-encode")
    store = open_replicas(
        config.store,
        token=config.token,
        options=HttpOptions(
            timeout_s=config.fetch_timeout_s,
            connect_timeout_s=min(_CONNECT_S, config.lookup_timeout_s),
            max_connections=config.max_connections,
            on_retry=lambda error: metrics.RETRIES.inc(),
        ),
        replicas=ReplicaOptions(
            on_race=lambda kind, result: metrics.RACES.labels(kind, result).inc(), on_failure=_count_failure
        ),
    )
    span_pages = _power_of_two_pages(config.span_tokens, heads.namespace.page_size)
    spec = SegmentSpec(
        heads,
        quantiser,
        config.codec,
        RESOLUTION,
        min(span_pages, max_span_pages or span_pages),
        encoders or {},
    )
    fetcher = Fetcher(
        store,
        _open_pool(config, nvdec),
        read_bytes=config.read_bytes,
        inflight_bytes=config.inflight_bytes,
        may_delete=config.writes,
        decode_bytes=_DECODE_BYTES,
        policy=None if config.decode_profile is None else LookAhead(horizon=_HORIZON),
    )
    return StoreClient(
        store,
        PageFinder(
            store,
            heads,
            quantiser,
            partial(count_miss, "lookup"),
            fetcher.link.answered,
            engine_codecs=() if nvdec is None else nvdec.codecs,
        ),
        fetcher,
        Writer(
            store,
            spec,
            encode_pool,
            max_segment_pages=_power_of_two_pages(MAX_SEGMENT_TOKENS, heads.namespace.page_size),
            queue_bytes=config.write_queue_bytes,
            linger_s=_LINGER_S,
            retire_s=max(_RETIRE_S, 2 * config.fetch_timeout_s),
        ),
        encode_pool,
    )


def open_encoders(config: KVFetchConfig) -> Mapping[str, FrameEncoder]:
    """Return the hardware encoders for this config's writer, by codec. Raises ConfigError."""
    if not config.writes:
        return {}
    encoders, about = nvenc.open_encoders(
        "auto",
        (config.codec,),
        config.codec_threads,
        lambda event: metrics.NVENC_BITSTREAMS.labels(event).inc(),
    )
    if about:
        logger.info("kvfetch: %s", about)
    return encoders


def count_fetch(result: FetchResult, timeout_s: float) -> None:
    """Count the misses of a fetch, by reason."""
    for failure in result.failures:
        count_miss("fetch", failure)
    if result.timed_out:
        count_miss("fetch", TimeoutError(f"not all pages arrived within {timeout_s:g} s"))
    for reason, happened in (("no_slots", result.starved), ("late", result.late)):
        if happened:
            metrics.MISSES.labels("fetch", reason).inc()


def _open_pool(config: KVFetchConfig, nvdec: Nvdec | None) -> DecodePool[Decoders]:
    """Open as many decode sessions as the profile says, or ``codec_threads`` without one, and with NVDEC at least one
    per video engine. Raises ConfigError."""
    profile = None if config.decode_profile is None else load_decode_profile(Path(config.decode_profile))
    num_sessions = config.codec_threads if profile is None else profile.num_sessions
    if nvdec is None:
        return DecodePool([{}] * num_sessions, profile)
    nvdec.surfaces.limit_bytes = MAX_SURFACE_BYTES
    return DecodePool([nvdec.open_session() for _ in range(max(num_sessions, nvdec.num_engines))], profile)


def count_miss(stage: str, error: KVFetchError | TimeoutError) -> None:
    """Count a miss of a lookup or a fetch, and log it at a limited rate."""
    reason = "timeout" if isinstance(error, TimeoutError) else failure_reason(error)
    metrics.MISSES.labels(stage, reason).inc()
    _limited.warning(f"{stage} {reason}", f"kvfetch {stage} is a miss ({reason}): {error}")


@contextmanager
def counted(stage: str, cancelling_is_a_miss: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Count and suppress every exception of a lookup or a fetch."""
    try:
        yield
    except asyncio.CancelledError:
        if cancelling_is_a_miss():
            metrics.MISSES.labels(stage, "cancelled").inc()
    except (KVFetchError, TimeoutError) as e:
        count_miss(stage, e)
    except Exception:
        logger.exception("kvfetch %s failed", stage)
        metrics.MISSES.labels(stage, "internal").inc()


def _count_failure(replica: str, error: StoreError) -> None:
    metrics.REPLICA_FAILURES.labels(replica, error.reason).inc()
    _limited.warning(f"{replica} {error.reason}", f"kvfetch store {replica} ({error.reason}): {error}")


def _power_of_two_pages(tokens: int, page_size: int) -> int:
    """Return the largest power of two of pages that fits into ``tokens``, at least 1."""
    return 1 << (max(1, tokens // page_size).bit_length() - 1)
