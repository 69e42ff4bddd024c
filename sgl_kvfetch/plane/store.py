"""Open the stores that a config names, and count what happens there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import read_encryption_keys, read_manifest_keys
from sgl_kvfetch.directory import LocalStore, open_store
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.disk_tier import DiskTier, DiskTierOptions
from sgl_kvfetch.plane.store_options import s3_options, tls_files
from sgl_kvfetch.stores import HttpOptions, Store, open_hedged, with_keys

_limited = LimitedLogger(logging.getLogger(__name__))

_CONNECT_S = 5.0  # limit for one attempt to connect to the store


def open_configured_store(
    config: KVFetchConfig, heads: HeadSlice | None = None, on_received: Callable[[int], None] = lambda num_bytes: None
) -> Store:
    """Open the store that the config names, behind the local cache if there is one. Raises ConfigError.
    ``on_received``: as for `HedgedStore`."""
    store = _open_store(config, on_received)
    if config.local_cache is not None:
        store = DiskTier(
            store,
            LocalStore(config.local_cache.path, capacity_bytes=config.local_cache.capacity),
            DiskTierOptions(
                lookup_timeout_s=config.lookup_timeout_s / 2,
                heads=heads.heads if heads is not None else None,
                on_read=lambda tier, num_bytes: metrics.LOCAL_CACHE_READ_BYTES.labels(tier).inc(num_bytes),
                on_fill=lambda result: metrics.LOCAL_CACHE_FILLS.labels(result).inc(),
                on_failure=_count_cache_failure,
                on_outage=_count_outage,
            ),
        )
    encryption_keys = read_encryption_keys(config.encryption_key_file)
    return with_keys(store, read_manifest_keys(config.manifest_key_file), encryption_keys)  # also what the disk answers


def _open_store(config: KVFetchConfig, on_received: Callable[[int], None]) -> Store:
    if config.store.startswith("file:"):
        return open_store(config.store, token=config.token)  # reads of a directory are not hedged
    return open_hedged(
        config.store,
        token=config.token,
        options=HttpOptions(
            timeout_s=config.fetch_timeout_s,
            connect_timeout_s=min(_CONNECT_S, config.lookup_timeout_s),
            max_connections=config.max_connections,
            on_retry=lambda error: metrics.RETRIES.inc(),
            tls=tls_files(config),
        ),
        s3=replace(
            s3_options(config),
            on_index_failure=lambda error: metrics.INDEX_FAILURES.labels(error.reason).inc(),
        ),
        on_hedge=lambda kind, result: metrics.HEDGED_READS.labels(kind, result).inc(),
        on_received=on_received,
    )


def _count_cache_failure(operation: str, error: StoreError) -> None:
    metrics.LOCAL_CACHE_FAILURES.labels(operation, error.reason).inc()
    _limited.warning(f"cache {operation} {error.reason}", f"kvfetch local_cache ({operation}, {error.reason}): {error}")


def _count_outage(error: StoreError) -> None:
    metrics.LOCAL_CACHE_LOOKUPS.inc()
    _limited.warning("outage", f"kvfetch store ({error.reason}): {error}; lookups are answered from local_cache")
